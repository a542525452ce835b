"""Codecs, link references and statistics of a layer's tensors at one step.

Sizes in shapes: L links, G groups of tokens, H heads, T tokens, D head dim, as in :mod:`codecs`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from xfuser_cocodiff.engine.comm.comm_stream import CommStream
from xfuser_cocodiff.engine.comm.head_group import HeadGroup
from xfuser_cocodiff.engine.compression import codecs
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.codecs import EXACT, Codec, QuantError
from xfuser_cocodiff.engine.compression.link_reference import LinkReference
from xfuser_cocodiff.engine.kernels.rows import ActiveTokens


@dataclass
class LinkState:
    """Link references of one head group of one tensor of a layer, for this rank's links in both directions."""

    sent: LinkReference
    """Reference of the values that this rank sends."""
    received: LinkReference
    """Reference of the values that this rank receives."""
    in_flight: bool = False
    """Whether a collective has started and not ended; the references of both ends may differ until it has."""

    @property
    def nbytes(self) -> int:
        """Memory of both references in bytes."""
        return self.sent.nbytes + self.received.nbytes

    def to_int8(self, comm_stream: CommStream | None = None) -> None:
        """Store the references in int8 from now on; the other ends must do so between the same two collectives.

        Args:
            comm_stream: stream on which values are encoded; None if they are encoded on the caller's stream.
        """
        if comm_stream:
            comm_stream.start("convert references to int8", self.sent.to_int8).wait()
        else:
            self.sent.to_int8()
        self.received.to_int8()


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
    quant_errors: list[QuantError] = field(default_factory=list)
    """Reconstruction error of each lossy tensor; kept on the device until they are read."""
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
    seed: int = 0
    """Seed of random token scores; differs between steps."""
    int8_references: bool = False
    """Whether references are stored in int8."""
    keyframe_codec: Codec = EXACT
    """Codec for tensors without a reference; it must be stateless."""
    single_stage: bool = False
    """Whether all-to-alls take one stage, see :mod:`coded_all_to_all`; references fit one of the two forms only."""
    gathers_kv: bool = False
    """Whether K and V are gathered along the slow axes, and Q and O stay off them."""
    selections: dict[tuple[str, HeadGroup], Selection] = field(default_factory=dict)
    """Active tokens that V and O have selected at this step."""

    @property
    def is_stateless(self) -> bool:
        """Whether no tensor needs a reference, as at the first step."""
        return all(codec.is_stateless for codec in self.codecs.values())

    def link_state(self, name: str, head_group: HeadGroup) -> LinkState:
        """Return the link state of a head group of a tensor, creating it on first use."""
        if (name, head_group) not in self.link_states:
            sent, received = (LinkReference(self.int8_references) for _ in range(2))
            self.link_states[name, head_group] = LinkState(sent, received)
        return self.link_states[name, head_group]


def codec_for(
    layer_codecs: LayerCodecs, name: str, head_group: HeadGroup, shape: Sequence[int], dtype: torch.dtype
) -> Codec:
    """Return the codec of a tensor (L, G, H, T, D).

    It is the keyframe codec if there is no reference or the last collective never ended, and sends all tokens of Q or K
    if V has no selection for them. The result depends on shapes and earlier collectives only, which are equal on all
    ranks.
    """
    codec, link_state = layer_codecs.codecs[name], layer_codecs.link_state(name, head_group)
    if codec.is_keyframe:
        return codec
    if link_state.in_flight or not link_state.sent.fits(shape, dtype):
        return layer_codecs.keyframe_codec
    if codec.selects_tokens and name not in codecs.SELECTING:
        selection = layer_codecs.selections.get(("v", head_group))
        if selection is None or selection.sent.tokens != shape[codecs.TOKEN_DIM]:
            return replace(codec, token_fraction=1.0)
    return codec


def active_tokens_for(
    layer_codecs: LayerCodecs,
    name: str,
    head_group: HeadGroup,
    values: torch.Tensor,
    codec: Codec,
    local_slots: range | None = None,
) -> ActiveTokens | None:
    """Return the tokens of a tensor that are sent: its own selection or V's; None if all or no tokens are sent.

    Args:
        layer_codecs: keeps the selections.
        name: the tensor's letter.
        head_group: head group of the values.
        values: (P, G, H, T, D).
        codec: codec of the tensor.
        local_slots: slots of this rank, which are skipped; None for none.
    """
    if not codec.selects_tokens:
        return None
    if name in codecs.SELECTING:
        reference = layer_codecs.link_state(name, head_group).sent
        active = codecs.select_tokens(values, reference, codec, layer_codecs.seed, local_slots)
        layer_codecs.selections[name, head_group] = Selection(active)
        return active
    return layer_codecs.selections["v", head_group].sent


def is_finite(error: QuantError) -> bool:
    """Return whether the values were finite: if not, their error energy is not finite either."""
    return math.isfinite(error.error_energy.item())
