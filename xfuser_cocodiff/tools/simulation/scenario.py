"""A model, its input size and the ranks that share its sequence: what a prediction is about."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from xfuser_cocodiff.engine.codec.quantize import tokens_per_row
from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.tools.accelerator.accelerators import Accelerator
from xfuser_cocodiff.tools.simulation import assumed_change
from xfuser_cocodiff.tools.simulation.layers import BYTES_PER_VALUE, CROSS_TEXT, IMAGE, JOINT, ROW, TEXT
from xfuser_cocodiff.tools.simulation.sharding import TokenShard, shard
from xfuser_cocodiff.tools.simulation.workloads import Workload

STOCK = "stock"
"""Name of stock xDiT among the modes."""


@dataclass(frozen=True)
class Scenario:
    """A model, its input size and the ranks that share its sequence."""

    workload: Workload
    resolution: int
    """Pixels per side, or rows of a video."""
    batch: int
    """Number of images."""
    steps: int
    """Number of denoising steps."""
    topology: Topology
    """Topology of all ranks."""
    link_profile: Callable[[Topology, float], Profile]
    """Returns the link profile of some axes for messages of so many bytes per rank."""
    accelerator: Accelerator | None
    """Device of a rank; None if unknown."""
    changes: Sequence[float] = assumed_change.PUBLISHED
    """Change per step that sets the bits; see :mod:`assumed_change`."""
    assumption: str = assumed_change.DESCRIPTION
    """What the changes are, in words."""

    @property
    def shard(self) -> TokenShard:
        """Tokens of one rank."""
        return shard(self.workload, self.resolution, self.topology.size)

    @property
    def values_of_row(self) -> int:
        """Number of values of K and V that share a scale."""
        dim = self.workload.head_dim
        return dim * tokens_per_row(dim, self.shard.num_tokens("v"))

    @property
    def layer_calls(self) -> int:
        """Number of layers of a step, counted once for each call of guidance."""
        return self.workload.layers * self.workload.calls

    @property
    def rows(self) -> int:
        """Number of batch rows in a call."""
        return self.batch * self.workload.rows_per_image

    @property
    def token_counts(self) -> dict[str, float]:
        """Number of tokens of a rank by kind, over all batch rows."""
        shard, cross = self.shard, self.workload.cross_text_tokens
        counts = {IMAGE: shard.image, TEXT: shard.text, JOINT: shard.queries, CROSS_TEXT: cross, ROW: 1}
        return {name: self.rows * count for name, count in counts.items()}

    def slow_axes_of(self, group: Topology) -> tuple[str, ...]:
        """Return the axes on which modes compress within a Ulysses group or a ring, which are measured separately."""
        return () if group.size == 1 else self.link_profile(group, self.message_bytes("q")).slow_axes

    def message_bytes(self, name: str) -> int:
        """Return the bytes per rank of one of q, k, v and o."""
        return self.rows * self.shard.num_tokens(name) * self.workload.width * BYTES_PER_VALUE
