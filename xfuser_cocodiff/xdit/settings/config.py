"""Config of a session, validated and frozen."""

from dataclasses import dataclass
from pathlib import Path

from xfuser_cocodiff.engine.autotune.comm_config import CommConfig
from xfuser_cocodiff.engine.compression.default_mode import EXACT, PAPER
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.settings.ring_placement import GroupPlacement

AUTO = "auto"
MEASURED_SLOW_AXES = (AUTO,)
"""Value of `CocoDiffConfig.slow_axes` that leaves them to the link probe, on whose result all ranks agree."""


@dataclass(frozen=True)
class Overlap:
    """Overlap of communication and computation that the user fixed; None leaves a value to the autotuner."""

    v_first: bool | None = None
    """Whether V is sent before Q and K are computed."""
    head_groups: int | None = None
    """Number of groups into which the heads of a rank are split."""


@dataclass(frozen=True, kw_only=True)
class CocoDiffConfig(GroupPlacement):
    """Config of one session of the plugin, the same on every rank."""

    plan: Plan | None = None
    """Plan of the all-to-all; None leaves it to the planner."""

    timeout: float | None = None
    """Longest time of a collective in seconds; None is the default of PyTorch."""

    overlap: Overlap = Overlap()
    """Overlap of communication and computation."""

    mode: str = EXACT
    """Mode of compression, one of MODES."""

    schedule: str | None = None
    """Changes to the schedule of the mode, among them another target of the error."""

    slow_axes: tuple[str, ...] = ()
    """Names of the axes on which a lossy mode may approximate; MEASURED_SLOW_AXES leaves it to the link probe."""

    virtual: Topology | None = None
    """Topology of virtual ranks; None without them."""

    virtual_ring: bool = False
    """Whether the virtual ranks are a ring rather than a Ulysses group."""

    memory_budget: int | None = None
    """Most bytes of link references on each rank; None is the default, by free memory."""

    kernels: str = AUTO
    """Kernels of the codecs, one of kernels.CHOICES."""

    synchronous: bool = False
    """Whether collectives block (CCL_OP_SYNC), so that an accelerator hides no communication."""

    cache: Path | None = None
    """Folder of the tuning cache; None disables it."""

    @property
    def comm(self) -> CommConfig:
        """Config of the communication of a Ulysses group."""
        slow_axes = None if self.slow_axes == MEASURED_SLOW_AXES else self.slow_axes
        return CommConfig(
            topology=self.topology,
            plan=self.plan,
            profile=self.profile,
            timeout=self.timeout,
            slow_axes=slow_axes if self.mode != EXACT else (),
            gathers_coded=self.mode != PAPER,  # which has no gather
            synchronous=self.synchronous,
        )
