"""The options of the plugin: flags, environment variables, defaults and help texts."""

from dataclasses import dataclass
from typing import Any

from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.compression.mode_names import MODES, MULTI_NODE_MODE
from xfuser_cocodiff.engine.compression.modes import BALANCED, FAST
from xfuser_cocodiff.engine.topology import launcher, plans
from xfuser_cocodiff.engine.topology.topology import NOTATION
from xfuser_cocodiff.xdit.settings.ring_placement import PLACEMENTS

AUTO = "auto"
OFF = "off"
OVERLAPS = (AUTO, "on", "off")
ENABLE_OPTION = "use_cocodiff"
"""Option that enables the plugin."""
RECORD_VARIABLE = "COCODIFF_RECORD"
"""Environment variable: folder in which every rank writes a record of its runs, for `cocodiff compare`."""
TRACE_VARIABLE = "COCODIFF_TRACE"
"""Environment variable: if set, records have a trace of the last steps."""
LOG_LEVEL_VARIABLE = "COCODIFF_LOG_LEVEL"
"""Environment variable: least severe level of the messages that are logged, one of LOG_LEVELS."""
LOG_LEVELS = ("debug", "info", "warning", "error")
OTHER_VARIABLES = (
    *(RECORD_VARIABLE, TRACE_VARIABLE, LOG_LEVEL_VARIABLE),
    *(launcher.CLUSTER_VARIABLE, "COCODIFF_DISABLE", "COCODIFF_CACHE"),
    *("COCODIFF_PYTHON", "COCODIFF_SYSTEM_TORCH", "COCODIFF_TORCH", "COCODIFF_TORCH_INDEX"),
)
"""Variables that are not options: those of records, logs, the entry point, the emulated cluster and the scripts."""


@dataclass(frozen=True)
class Option:
    """Option of the plugin: a flag of xDiT's parsers, a field of its arguments and an environment variable."""

    field: str
    """Name of the field in xDiT's arguments."""
    variable: str
    """Environment variable."""
    default: Any
    """Value if neither flag nor variable is given; False makes the flag a switch."""
    help: str
    """Help text of the flag."""
    choices: tuple[str, ...] | None = None
    """Valid values, if these are few; others are checked by the config."""

    @property
    def flag(self) -> str:
        """Flag of the command line."""
        return f"--{self.field}"


OPTIONS = (
    Option(ENABLE_OPTION, "COCODIFF_ENABLE", False, "Enable the plugin."),
    Option(
        "cocodiff_topology",
        "COCODIFF_TOPOLOGY",
        None,
        f"Topology of a Ulysses group, or with --ring_degree of all ranks that share a sequence: {NOTATION}. Default: "
        "detected from the launcher.",
    ),
    Option(
        "cocodiff_ring",
        "COCODIFF_RING",
        None,
        "Placement with --ring_degree: 'outer' (default, as in xDiT) lays the ring across the slowest axis, 'inner' "
        "the Ulysses group. `cocodiff plan --model` predicts which is faster.",
        PLACEMENTS,
    ),
    Option(
        "cocodiff_a2a",
        "COCODIFF_A2A",
        None,
        f"Plan of the all-to-all: {plans.NOTATION}, or {AUTO!r} (default): the planner chooses one for each message "
        f"size. In lossy modes a plan without {plans.GATHER} sends Q, K, V and O by heads.",
    ),
    Option(
        "cocodiff_profile",
        "COCODIFF_PROFILE",
        None,
        "Link profile for the planner, written by `cocodiff probe --json`. Default: links are probed at startup.",
    ),
    Option(
        "cocodiff_timeout",
        "COCODIFF_TIMEOUT",
        None,
        "Seconds after which an unresponsive rank ends the job with an error that names it. Default: the timeout of "
        "PyTorch's backend.",
    ),
    Option(
        "cocodiff_v_first",
        "COCODIFF_V_FIRST",
        None,
        "Send V before Q and K are computed: 'on', 'off', or 'auto' (default): if the planner predicts a gain and "
        "timed steps confirm it.",
        OVERLAPS,
    ),
    Option(
        "cocodiff_head_groups",
        "COCODIFF_HEAD_GROUPS",
        None,
        "Number of groups into which the heads of a rank are split, so that one attends while others are sent. Only in "
        f"exact mode or where K and V are gathered, and outside of compiled graphs. {AUTO!r} (default): numbers that "
        "the planner expects to pay are tried on accelerators, and timed steps choose; 1 on CPUs.",
    ),
    Option(
        "cocodiff_mode",
        "COCODIFF_MODE",
        None,
        f"Compression on slow axes: 'exact' is lossless; 'balanced' keeps the mean error at {BALANCED.error:g} (FP8), "
        f"'fast' at {FAST.error:g} (FP4); 'paper' is V-Major. Default: {MULTI_NODE_MODE!r} if ranks of a "
        "sequence are on several nodes and for virtual ranks, otherwise 'exact'.",
        MODES,
    ),
    Option(
        "cocodiff_schedule",
        "COCODIFF_SCHEDULE",
        None,
        "Changes to how the mode codes values, such as 'bits=2' for the same bits at all steps.",
    ),
    Option(
        "cocodiff_slow_axes",
        "COCODIFF_SLOW_AXES",
        None,
        f"Axes on which a mode may be lossy, such as 'node,gpu', or {AUTO!r}: those measured as slow. Default: "
        f"{AUTO!r}, on CPUs 'node'; for virtual ranks, all axes but the innermost.",
    ),
    Option(
        "cocodiff_virtual",
        "COCODIFF_VIRTUAL",
        None,
        "Topology of virtual ranks: one rank with --ulysses_degree 1 applies the compression of that many, to evaluate "
        "quality. 'ring:TOPOLOGY' simulates a ring.",
    ),
    Option(
        "cocodiff_error",
        "COCODIFF_ERROR",
        None,
        "Mean error of what crosses slow axes, relative to its norm, that bits are chosen for. Default: the mode's.",
    ),
    Option(
        "cocodiff_memory_budget",
        "COCODIFF_MEMORY_BUDGET",
        None,
        "GiB of link references on each rank. Default: free memory less a reserve; no limit on CPUs.",
    ),
    Option(
        "cocodiff_kernels",
        "COCODIFF_KERNELS",
        None,
        f"Kernels of the codecs. {AUTO!r} (default): Triton on accelerators where it can build, otherwise PyTorch.",
        kernels.CHOICES,
    ),
    Option(
        "cocodiff_cache",
        "COCODIFF_CACHE",
        None,
        f"Folder that caches link profiles and tuned schedules for later runs; {OFF!r} disables it. Default: "
        "~/.cache/cocodiff.",
    ),
    Option(
        launcher.SHARE_FIELD,
        launcher.SHARE_VARIABLE,
        False,
        "Several ranks share one device, and messages go through host memory. Default: detected if a node has more "
        "ranks than devices.",
    ),
)
