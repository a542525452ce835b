"""State of a layer in one branch of guidance, from its first call in a run to the run's end."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from xfuser_cocodiff.engine.compression.layer_codecs import CodecStats
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes, ReferenceBytes


@dataclass
class LayerState:
    """Link states and statistics of one layer in one branch."""

    layer: str
    """Name of the layer."""
    transformer: Hashable
    """Key of the layer's transformer."""
    sizes: LayerSizes
    """Sizes of the layer's tensors."""
    planned_bytes: ReferenceBytes
    """Memory that the layer's references take."""
    is_exact: bool
    """Whether the layer is lossless at all steps and has no references."""
    single_stage: bool
    """Whether all-to-alls take one stage, see :mod:`coded_all_to_all`."""
    has_references: bool = True
    """Whether residuals are sent; for lack of memory each step is a keyframe."""
    gathers_kv: bool = False
    """Whether K and V are gathered along the slow axes of the Ulysses group."""
    coding_seconds: tuple[float, float] = (0.0, 0.0)
    """Link time that coding saves, and host time that it adds; the layer is lossless if it does not save more."""
    link_states: dict = field(default_factory=dict)
    """Link states of the Ulysses group."""
    ring_link_states: dict = field(default_factory=dict)
    """Link states of the ring."""
    stats: CodecStats = field(default_factory=CodecStats)
    """Statistics of the current step."""
    first_step: int = 0
    """Step of the layer's first call, at which it has no references."""
    last_step: int = 0
    """Step of the layer's last call."""
    previous_step: int = -1
    """Step of the one before, or -1."""
    batched_branches: int = 1
    """Number of branches in the batch of the layer's last call."""

    @property
    def saves_time(self) -> bool:
        """Whether coding saves more link time than it adds host time."""
        saved, added = self.coding_seconds
        return saved >= added
