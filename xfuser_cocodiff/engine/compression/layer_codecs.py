"""Codecs, link references and statistics of a layer's tensors at one step.

Sizes in shapes: L links, G groups of tokens, H heads, T tokens, D head dim, as in :mod:`codec`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from xfuser_cocodiff.engine.codec import rows
from xfuser_cocodiff.engine.codec.active_tokens import ActiveTokens
from xfuser_cocodiff.engine.codec.link_reference import LinkReference
from xfuser_cocodiff.engine.codec.memory import lasting
from xfuser_cocodiff.engine.comm.head_group import HeadGroup
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.send_buffer import SendBuffer
from xfuser_cocodiff.engine.compression.step_codecs import StepCodecs
from xfuser_cocodiff.engine.compression.step_errors import StepErrors, TensorError


@dataclass
class SentValues:
    """Values that a leading branch has sent in a step."""

    step: int
    """The step."""
    shape: tuple[int, ...]
    """Their shape (L, G, H, T, D)."""
    dtype: torch.dtype
    """Their type."""
    kept: torch.Tensor | None = None
    """The values, (L, G, H, T, D); None if they are not kept."""
    error: TensorError | None = None
    """Their error; None if they were sent losslessly."""


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

    def keep(self, values: torch.Tensor) -> torch.Tensor:
        """Return a copy of values, in the memory of those that were kept before if it fits."""
        before = self.sent_values.kept if self.sent_values else None
        if before is None or before.shape != values.shape or before.dtype != values.dtype:
            before = lasting(values.shape, values.dtype, values.device)
        return before.copy_(values)

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
    """Bytes and retransmissions of coded collectives."""

    sent_bytes: int = 0
    """Bytes that this rank sent as the source to other coordinates on slow axes."""
    exact_bytes: int = 0
    """Bytes that the same values take without codecs."""
    repeated: int = 0
    """Messages that were repeated losslessly because some values were not finite. Counted on CPUs only: on
    accelerators the host would have to wait, and the next step is lossless instead."""


@dataclass
class LayerCodecs:
    """How the tensors of a layer are coded at one step, in one branch of guidance."""

    partition: AxisPartition | None
    """Slow and fast axes; None for ranks that do not communicate."""
    step: StepCodecs
    """Codecs of the step."""
    link_states: dict[tuple[str, HeadGroup], LinkState]
    """Link states of the layer by tensor and head group; they outlive the step."""
    stats: CodecStats
    """Statistics that the collectives add to."""
    errors: StepErrors
    """Errors that the collectives add to."""
    layer: str = ""
    """Name of the layer."""
    counts_errors: bool = True
    """Whether rate control counts the layer's errors."""
    gathers_kv: bool = False
    """Whether K and V are gathered along the slow axes, and Q and O stay off them."""
    leader: Mapping[tuple[str, HeadGroup], LinkState] | None = None
    """Link states of this layer in the leading branch; None in that branch, and where there is none."""
    keeps_values: bool = False
    """Whether other branches of this layer follow in this step, for which sent values are kept."""
    send_buffer: SendBuffer = field(default_factory=SendBuffer)
    """Memory of the message that is being sent."""
    selections: dict[tuple[str, HeadGroup], Selection] = field(default_factory=dict)
    """Active tokens that V and O have selected at this step."""

    @property
    def slow_and_fast(self) -> AxisPartition:
        """Slow and fast axes, of ranks that communicate."""
        assert self.partition
        return self.partition

    @property
    def is_keyframe(self) -> bool:
        """Whether the step uses no references of earlier steps."""
        return self.step.is_keyframe

    def link_state(self, name: str, head_group: HeadGroup) -> LinkState:
        """Return the link state of a head group of a tensor, creating it on first use."""
        state = self.link_states.get((name, head_group))
        if state is None:
            sent, received = (LinkReference(self.step.has_exact_references) for _ in range(2))
            state = self.link_states[name, head_group] = LinkState(sent, received)
        return state

    def leader_of(self, name: str, head_group: HeadGroup) -> LinkState | None:
        """Return the link state of a tensor in the leading branch; None if the tensor follows none."""
        return self.leader.get((name, head_group)) if self.leader else None

    def note_sent(
        self,
        name: str,
        head_group: HeadGroup,
        values: torch.Tensor,
        local_slots: range | None,
        error: TensorError | None,
    ) -> None:
        """Note the values (P, G, H, T, D) that a tensor of the leading branch sends in this step, for others."""
        if not self.step.is_joint:
            return
        state = self.link_state(name, head_group)
        kept = state.keep(rows.remote_slots(values, local_slots)) if self.keeps_values else None
        shape = rows.link_shape(values, local_slots)
        state.sent_values = SentValues(self.step.number, shape, values.dtype, kept, error)

    def drop_references(self, names: Iterable[str], head_group: HeadGroup) -> None:
        """Drop the link states of tensors whose message has been decoded, unless references are kept."""
        if not self.step.keeps_references:
            for name in names:
                self.link_states.pop((name, head_group), None)
