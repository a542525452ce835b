"""The options of the plugin: names, variables, defaults and what is said of them."""

from dataclasses import dataclass
from typing import Any

from xfuser_cocodiff.engine import kernels
from xfuser_cocodiff.engine.compression import modes
from xfuser_cocodiff.engine.settings.ring_placement import PLACEMENTS
from xfuser_cocodiff.engine.topology import launcher, plans
from xfuser_cocodiff.engine.topology.topology import NOTATION

AUTO = "auto"
OFF = "off"
EXACT = "exact"
MODES = (EXACT, "paper", "balanced", "fast")
ACROSS_NODES = "balanced"
"""The mode where none is given and ranks lie on several nodes; within a node it is exact."""
OVERLAPS = (AUTO, "on", "off")
ASKED = "use_cocodiff"
"""The option that asks for the plugin."""
RECORD_VARIABLE = "COCODIFF_RECORD"
"""Environment variable: folder in which every rank leaves a record of its runs, for `cocodiff compare`."""
TRACE_VARIABLE = "COCODIFF_TRACE"
"""Environment variable: when set, a trace of the last steps is recorded too."""
OTHER_VARIABLES = (
    *(RECORD_VARIABLE, TRACE_VARIABLE, launcher.CLUSTER_VARIABLE, "COCODIFF_DISABLE", "COCODIFF_CACHE"),
    *("COCODIFF_PYTHON", "COCODIFF_SYSTEM_TORCH", "COCODIFF_TORCH", "COCODIFF_TORCH_INDEX"),
)
"""Variables that are no options: of the entry point, the emulated cluster and the scripts."""


@dataclass(frozen=True)
class Option:
    """One option of the plugin: a flag of xDiT's parsers, a field of its arguments and an environment variable."""

    field: str
    variable: str
    default: Any
    help: str
    choices: tuple[str, ...] | None = None

    @property
    def flag(self) -> str:
        return f"--{self.field}"


OPTIONS = (
    Option(ASKED, "COCODIFF_ENABLE", False, "Run Ulysses attention over CoCoDiff's exchanges."),
    Option(
        "cocodiff_topology",
        "COCODIFF_TOPOLOGY",
        None,
        f"Topology of a Ulysses group: {NOTATION}. With --ring_degree it may be that of all ranks of both. Detected "
        "from the launcher when not given.",
    ),
    Option(
        "cocodiff_ring",
        "COCODIFF_RING",
        None,
        "Where the ring lies with --ring_degree: outer (the default, xDiT's own: across the machine, Ulysses among "
        "neighbouring ranks) or inner (the other way round). `cocodiff plan --model` says which is faster.",
        PLACEMENTS,
    ),
    Option(
        "cocodiff_a2a",
        "COCODIFF_A2A",
        None,
        f"Plan of the all-to-all: {AUTO!r} (the default, the planner's choice for each size), {plans.NOTATION}.",
    ),
    Option(
        "cocodiff_profile",
        "COCODIFF_PROFILE",
        None,
        "What the planner goes by: a file that `cocodiff probe --json` wrote. The links are probed when not given.",
    ),
    Option(
        "cocodiff_timeout",
        "COCODIFF_TIMEOUT",
        None,
        "Seconds after which an all-to-all that a rank does not answer ends the job; torch's default when not given.",
    ),
    Option(
        "cocodiff_v_first",
        "COCODIFF_V_FIRST",
        None,
        "Whether V's exchange starts before Q and K are there: on, off, or auto (the default): if the planner says "
        "that it pays and no comparison of whole steps says otherwise.",
        OVERLAPS,
    ),
    Option(
        "cocodiff_head_groups",
        "COCODIFF_HEAD_GROUPS",
        None,
        "Groups of a rank's heads, of which one attends while others travel, in exact mode and not in compiled "
        f"graphs: a number; {AUTO} (the default) is one.",
    ),
    Option(
        "cocodiff_mode",
        "COCODIFF_MODE",
        None,
        "What travels on slow axes: exact equals stock xDiT bit for bit; the others approximate. Without it, "
        f"{ACROSS_NODES} where the launcher started ranks on several nodes and for virtual ranks, else exact.",
        MODES,
    ),
    Option(
        "cocodiff_schedule",
        "COCODIFF_SCHEDULE",
        None,
        f"Changes to a mode's schedule, such as {modes.NOTATION}; @FILE is one that cocodiff tune has made.",
    ),
    Option(
        "cocodiff_slow_axes",
        "COCODIFF_SLOW_AXES",
        None,
        f"Axes on which a mode may approximate, such as 'node,gpu', or {AUTO!r}: those that are measured as "
        "slow. When not given, the axis 'node', and of virtual ranks all but the innermost.",
    ),
    Option(
        "cocodiff_virtual",
        "COCODIFF_VIRTUAL",
        None,
        "Topology of ranks that are not there: with --ulysses_degree 1, approximate as they would, to see the cost.",
    ),
    Option(
        "cocodiff_max_error",
        "COCODIFF_MAX_ERROR",
        None,
        "Relative error of a layer's values above which the next step travels exactly; no bound when not given.",
    ),
    Option(
        "cocodiff_memory_budget",
        "COCODIFF_MEMORY_BUDGET",
        None,
        "GiB that a mode's references may take on each rank; no bound when not given.",
    ),
    Option(
        "cocodiff_kernels",
        "COCODIFF_KERNELS",
        None,
        f"Kernels of the codecs: triton, numba, torch, or {AUTO} (the default): Triton on accelerators, "
        "Numba on CPUs, PyTorch where these are not to be had.",
        kernels.CHOICES,
    ),
    Option(
        "cocodiff_cache",
        "COCODIFF_CACHE",
        None,
        "Folder that caches link profiles and chosen schedules for the next process; off keeps nothing. "
        "~/.cache/cocodiff when not given.",
    ),
    Option(
        launcher.SHARE_FIELD,
        launcher.SHARE_VARIABLE,
        False,
        "Several ranks have one device: messages go through the host's memory. Detected where ranks outnumber devices.",
    ),
)
