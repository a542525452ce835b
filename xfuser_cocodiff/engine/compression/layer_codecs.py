"""Codecs, link references and statistics of a layer's tensors at one step.

Sizes in shapes: L links, G groups of tokens, H heads, T tokens, D head dim, as in :mod:`coded_tensor`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from xfuser_cocodiff.engine.codec import rows
from xfuser_cocodiff.engine.codec.active_tokens import ActiveTokens, select_tokens
from xfuser_cocodiff.engine.codec.codec import EXACT, SELECTING, TOKEN_DIM, Codec
from xfuser_cocodiff.engine.codec.coded_tensor import QuantError
from xfuser_cocodiff.engine.codec.lead import Lead
from xfuser_cocodiff.engine.codec.link_reference import LinkReference, SentValues
from xfuser_cocodiff.engine.comm.head_group import HeadGroup
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition


@dataclass
class LinkState:
    """Link references of one head group of one tensor of a layer, for this rank's links in both directions."""

    sent: LinkReference
    """Reference of the values that this rank sends."""
    received: LinkReference
    """Reference of the values that this rank receives."""
    in_flight: bool = False
    """Whether a collective has started and not ended; the references of both ends may differ until it has."""
    sent_values: SentValues | None = None
    """Values that this rank sent last, if others may be coded as differences to them."""

    @property
    def nbytes(self) -> int:
        """Memory of both references, and of the values that are kept, in bytes."""
        kept = self.sent_values.kept if self.sent_values else None
        return self.sent.nbytes + self.received.nbytes + (0 if kept is None else kept.nbytes)

    def drop_kept(self) -> None:
        """Drop the values that are kept: no difference to them is coded."""
        if self.sent_values:
            self.sent_values.kept = None


@dataclass
class Selection:
    """Active tokens of one tensor at one step."""

    sent: ActiveTokens
    """Tokens that this rank sends."""
    received: ActiveTokens | None = None
    """Tokens that this rank receives; None until the message has arrived."""


@dataclass
class CodecStats:
    """Bytes, reconstruction errors and retransmissions of coded collectives."""

    sent_bytes: int = 0
    """Bytes that this rank sent as the source to other coordinates on slow axes."""
    exact_bytes: int = 0
    """Bytes that the same values take without codecs."""
    quant_errors: list[tuple[str, QuantError]] = field(default_factory=list)
    """Letter and reconstruction error of each lossy tensor, and name and error of yardsticks; kept on the device until
    they are read."""
    repeated: int = 0
    """Messages that were repeated losslessly because some values were not finite. Counted on CPUs only: on
    accelerators the host would have to wait, and the next step is lossless instead."""


@dataclass
class LayerCodecs:
    """How the tensors of a layer are encoded at one step."""

    partition: AxisPartition | None
    """Slow and fast axes; None for virtual ranks."""
    codecs: Mapping[str, Codec]
    """Codec of each tensor: q, k, v and o. Q, K and V have the same number of active tokens."""
    link_states: dict[tuple[str, HeadGroup], LinkState]
    """Link states of the layer by tensor and head group; they outlive the step."""
    stats: CodecStats
    """Statistics that the collectives add to."""
    step: int = 0
    """Step of the run, from 0."""
    exact_references: bool = False
    """Whether references are stored as they are, for V-Major."""
    keyframe_codec: Codec = EXACT
    """Codec for tensors without a reference; it must be stateless."""
    single_stage: bool = False
    """Whether all-to-alls take one stage, see :mod:`coded_all_to_all`; references fit one of the two forms only."""
    gathers_kv: bool = False
    """Whether K and V are gathered along the slow axes, and Q and O stay off them."""
    is_keyframe: bool = False
    """Whether the step uses no references of earlier steps."""
    joint: float = 0.0
    """Weight of the leading branch in the difference that is coded for other branches; 0 to code each by itself."""
    leader: Mapping[tuple[str, HeadGroup], LinkState] | None = None
    """Link states of this layer in the leading branch; None in that branch, and where there is none."""
    keeps_values: bool = False
    """Whether other branches of this layer follow in this step, for which sent values are kept."""
    batched_branches: int = 1
    """Number of branches that each call has in its batch, one after the other; the first leads the others."""
    keeps_references: bool = True
    """Whether references outlive a message; all tensors are keyframes where they do not."""
    measures_yardsticks: bool = False
    """Whether the errors of FP8 and FP4 on the same tensors are measured too."""
    selections: dict[tuple[str, HeadGroup], Selection] = field(default_factory=dict)
    """Active tokens that V and O have selected at this step."""

    def link_state(self, name: str, head_group: HeadGroup) -> LinkState:
        """Return the link state of a head group of a tensor, creating it on first use."""
        if (name, head_group) not in self.link_states:
            sent, received = (LinkReference(self.exact_references) for _ in range(2))
            self.link_states[name, head_group] = LinkState(sent, received)
        return self.link_states[name, head_group]

    def leader_of(self, name: str, head_group: HeadGroup) -> LinkState | None:
        """Return the link state of a tensor in the leading branch; None if the tensor follows none."""
        if self.leader is not None:
            return self.leader.get((name[0], head_group))
        return self.link_states.get((name[0], head_group)) if name[1:] else None

    def split_branches(self, name: str, values: torch.Tensor, samples: int) -> dict[str, torch.Tensor]:
        """Return the values (P, G, H, T, D) of each branch in a batch by name: q, q1, q2.

        Args:
            name: the tensor's letter.
            values: values of all branches.
            samples: number of samples in the batch, B; groups are those of all samples of a rank, rank by rank.

        Returns:
            Views, but copies if both several ranks and several samples of a branch are in the groups.
        """
        if not self.joint or samples % self.batched_branches or self.batched_branches == 1:
            return {name: values}
        parts = values.unflatten(1, (-1, samples)).chunk(self.batched_branches, 2)
        return {f"{name}{index or ''}": part.flatten(1, 2) for index, part in enumerate(parts)}

    def join_branches(self, parts: Sequence[torch.Tensor], samples: int) -> torch.Tensor:
        """Return the values (P, G, H, T, D) of all branches, the inverse of :meth:`split_branches`."""
        by_sample = [part.unflatten(1, (-1, samples // len(parts))) for part in parts]
        return torch.cat(by_sample, 2).flatten(1, 2) if len(parts) > 1 else parts[0]

    def note_sent(self, name: str, head_group: HeadGroup, values: torch.Tensor, local_slots: range | None) -> None:
        """Note the values (P, G, H, T, D) that a tensor sends in this step, for branches that follow it.

        Those of later calls need a copy; for those in the batch they are kept until :meth:`release_sent`.
        """
        if not self.joint or self.leader_of(name, head_group):
            return
        shape = (rows.num_links(len(values), local_slots), *values.shape[1:])
        self.link_state(name, head_group).sent_values = sent = SentValues(self.step, shape, values.dtype)
        if self.keeps_values or self.batched_branches > 1:
            remote = rows.remote_slots(values, local_slots)
            sent.kept = remote.clone(memory_format=torch.contiguous_format) if self.keeps_values else remote

    def drop_references(self, names: Iterable[str], head_group: HeadGroup) -> None:
        """Drop the link states of tensors whose message has been decoded, unless references are kept."""
        if not self.keeps_references:
            for name in names:
                self.link_states.pop((name, head_group), None)

    def release_sent(self, name: str, head_group: HeadGroup) -> None:
        """Drop the values that a tensor has sent, unless they are kept for later calls."""
        if not self.keeps_values:
            self.link_state(name, head_group).drop_kept()


class Joint(NamedTuple):
    """How a tensor of a following branch is coded in a step, the same at both ends of its links."""

    leader: LinkState
    """Link state of the tensor in the leading branch."""
    weight: float
    """See :attr:`Lead.weight`."""
    next_weight: float
    """See :attr:`Lead.next_weight`."""

    def at_sender(self) -> Lead:
        """Return the leading branch at the sender's end."""
        sent = self.leader.sent_values if self.weight else None
        return Lead(self.leader.sent, self.weight, self.next_weight, sent)

    def at_receiver(self) -> Lead:
        """Return the leading branch at the receiver's end."""
        return Lead(self.leader.received, self.weight, self.next_weight)


def joint_for(
    layer_codecs: LayerCodecs,
    name: str,
    head_group: HeadGroup,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    codec: Codec,
) -> Joint | None:
    """Return how a tensor (L, G, H, T, D) is coded with the leading branch; None if it follows none.

    It is coded by itself unless the leading branch has sent this tensor in this step, and has kept it. The result
    depends on shapes and earlier collectives only, which are equal at both ends.

    Args:
        layer_codecs: codecs of the layer.
        name: name of the tensor.
        head_group: head group of the values.
        shape: (L, G, H, T, D).
        dtype: type of the values.
        codec: codec of the tensor.
    """
    leader = layer_codecs.leader_of(name, head_group)
    if leader is None:
        return None
    sent, weight = leader.sent_values, layer_codecs.joint
    is_current = sent is not None and (sent.step, sent.dtype, sent.shape) == (layer_codecs.step, dtype, tuple(shape))
    if leader.in_flight or not is_current or (codec.sends_values and not codec.is_stateless):
        return Joint(leader, 0.0, 0.0)
    has_kept = sent.kept is not None and not codec.sends_values
    return Joint(leader, weight if has_kept else 0.0, weight)


def codec_for(
    layer_codecs: LayerCodecs, name: str, head_group: HeadGroup, shape: Sequence[int], dtype: torch.dtype
) -> Codec:
    """Return the codec of a tensor (L, G, H, T, D).

    It is the keyframe codec if the last collective never ended, or if there is no reference. One of a difference to the
    leading branch also needs that branch's. It sends all tokens of Q or K if V has no selection for them. The result
    depends on shapes and earlier collectives only, which are equal on all ranks.
    """
    codec, link_state = layer_codecs.codecs[name[0]], layer_codecs.link_state(name, head_group)
    if codec.is_keyframe:
        return codec
    if link_state.in_flight:  # the references of both ends may differ, so that none is kept
        return replace(layer_codecs.keyframe_codec, predicts=False)
    if not link_state.sent.fits(shape, dtype):
        return layer_codecs.keyframe_codec
    if link_state.sent.weight and not _has_leader(layer_codecs, name, head_group, shape):
        return layer_codecs.keyframe_codec
    if codec.selects_tokens and name[0] not in SELECTING:
        selection = layer_codecs.selections.get((selecting_name(name), head_group))
        if selection is None or selection.sent.tokens != shape[TOKEN_DIM]:
            return replace(codec, token_fraction=1.0)
    return codec


def _has_leader(layer_codecs: LayerCodecs, name: str, head_group: HeadGroup, shape: Sequence[int]) -> bool:
    """Return whether both ends of a tensor's links hold a reference of the leading branch."""
    leader = layer_codecs.leader_of(name, head_group)
    is_there = leader is not None and not leader.in_flight and leader.sent.has_values
    return is_there and tuple(leader.sent.shape) == tuple(shape)


def active_tokens_for(
    layer_codecs: LayerCodecs,
    name: str,
    head_group: HeadGroup,
    values: torch.Tensor,
    codec: Codec,
    local_slots: range | None = None,
    lead: Lead | None = None,
) -> ActiveTokens | None:
    """Return the tokens of a tensor that are sent: its own selection or V's; None if all or no tokens are sent.

    Args:
        layer_codecs: keeps the selections.
        name: name of the tensor.
        head_group: head group of the values.
        values: (P, G, H, T, D).
        codec: codec of the tensor.
        local_slots: slots of this rank, which are skipped; None for none.
        lead: leading branch at this end; None if there is none.
    """
    if not codec.selects_tokens:
        return None
    if name[0] in SELECTING:
        reference = layer_codecs.link_state(name, head_group).sent
        active = select_tokens(values, reference, codec, local_slots, lead)
        layer_codecs.selections[name, head_group] = Selection(active)
        return active
    return layer_codecs.selections[selecting_name(name), head_group].sent


def selecting_name(name: str) -> str:
    """Return the name of the tensor whose active tokens a tensor has: its own, or that of V in the same branch."""
    return name if name[0] in SELECTING else f"v{name[1:]}"


def is_finite(error: QuantError) -> bool:
    """Return whether the values were finite: if not, their error energy is not finite either."""
    return math.isfinite(error.error_energy.item())
