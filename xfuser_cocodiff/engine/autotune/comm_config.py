"""Config of the communication of a group, as far as it is set rather than measured."""

from dataclasses import dataclass

from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """Config of the communication of a group, the same on all of its ranks."""

    topology: Topology
    """Topology of the group."""

    plan: Plan | None = None
    """Plan of all-to-alls of all sizes; None leaves it to the planner."""

    profile: Profile | None = None
    """Link profile; None lets the links be probed where one is needed."""

    timeout: float | None = None
    """Longest time of a collective in seconds; None is the default of PyTorch."""

    slow_axes: tuple[str, ...] | None = ()
    """Names of the axes on which messages are coded: none where all are lossless; None leaves them to the link
    probe."""

    gathers_coded: bool = True
    """Whether coded layers may gather K and V along the slow axes."""

    synchronous: bool = False
    """Whether collectives block the host, so that an accelerator hides no communication."""
