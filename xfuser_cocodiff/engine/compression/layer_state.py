"""State of a layer in one branch of guidance, from its first call in a run to the run's end."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

from xfuser_cocodiff.engine.comm.head_group import HeadGroup
from xfuser_cocodiff.engine.compression.layer_codecs import CodecStats, LinkState
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes, ReferenceBytes


class CodedCall(NamedTuple):
    """A call of a layer in the current step; the same on all ranks."""

    layer: str
    """Name of the layer."""
    key: Hashable
    """Distinguishes the layer from those of other transformers."""
    branch: int
    """Number of the transformer's call within the step."""
    sizes: LayerSizes
    """Sizes of the layer's tensors on this rank."""
    transformer: Hashable = None
    """Distinguishes the layer's transformer from others."""
    gathers_kv: bool = False
    """Whether K and V are gathered along the slow axes, if this call is the layer's first in the run."""


@dataclass
class LayerState:
    """Link states and statistics of one layer in one branch."""

    first_call: CodedCall
    """First call of the layer in the run."""
    planned_bytes: ReferenceBytes
    """Memory that the layer's references take."""
    is_exact: bool
    """Whether the layer is lossless at all steps and has no references."""
    has_references: bool
    """Whether residuals are sent; for lack of memory each step is a keyframe."""
    coding_seconds: tuple[float, float]
    """Link time that coding saves, and host time that it adds; the layer is lossless if it does not save more."""
    first_step: int
    """Step of the layer's first call, at which it has no references."""
    last_step: int = field(init=False)
    """Step of the layer's last call."""
    previous_step: int = -1
    """Step of the one before, or -1."""
    link_states: dict[tuple[str, HeadGroup], LinkState] = field(default_factory=dict)
    """Link states of the Ulysses group."""
    ring_link_states: dict[tuple[str, HeadGroup], LinkState] = field(default_factory=dict)
    """Link states of the ring."""
    stats: CodecStats = field(default_factory=CodecStats)
    """Statistics of the current step."""

    def __post_init__(self) -> None:
        self.last_step = self.first_step

    @property
    def layer(self) -> str:
        """Name of the layer."""
        return self.first_call.layer

    @property
    def sizes(self) -> LayerSizes:
        """Sizes of the layer's tensors."""
        return self.first_call.sizes

    @property
    def gathers_kv(self) -> bool:
        """Whether K and V are gathered along the slow axes of the Ulysses group."""
        return self.first_call.gathers_kv

    @property
    def saves_time(self) -> bool:
        """Whether coding saves more link time than it adds host time."""
        saved, added = self.coding_seconds
        return saved >= added

    def is_like(self, other: "LayerState") -> bool:
        """Return whether two branches have the same sizes and are coded in the same way."""
        of_both = ((each.is_exact, each.has_references, each.gathers_kv, each.sizes) for each in (self, other))
        return next(of_both) == next(of_both)

    def links(self, is_ring: bool) -> dict[tuple[str, HeadGroup], LinkState]:
        """Return the link states of the ring, or of the Ulysses group."""
        return self.ring_link_states if is_ring else self.link_states

    def call(self, step: int) -> None:
        """Note a call of the layer at the current step."""
        if self.last_step != step:
            self.previous_step, self.last_step = self.last_step, step
