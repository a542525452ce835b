"""The options of the plugin, one row each: what it is called, how its value is read, and when it has no effect."""

from typing import NoReturn

from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.compression import modes
from xfuser_cocodiff.engine.compression.mode_names import EXACT, MODES, MULTI_NODE_MODE
from xfuser_cocodiff.engine.topology import plans
from xfuser_cocodiff.engine.topology.topology import NOTATION
from xfuser_cocodiff.xdit.settings import parsers
from xfuser_cocodiff.xdit.settings.config import AUTO
from xfuser_cocodiff.xdit.settings.option import Ignored, Option
from xfuser_cocodiff.xdit.settings.parsers import FALSE, MAX_SECONDS, OFF, TRUE
from xfuser_cocodiff.xdit.settings.ring_placement import PLACEMENTS

ENABLE_OPTION = "use_cocodiff"
"""Option that enables the plugin."""
SHARE_FIELD, SHARE_VARIABLE = "cocodiff_share_device", "COCODIFF_SHARE_DEVICE"
"""Option and environment variable that declare several ranks to share one device."""
_WITHOUT_RING = Ignored("without --ring_degree above 1", lambda config: config.ring_topology is None)
_IN_EXACT = Ignored(f"in mode {EXACT!r}", lambda config: config.mode == EXACT)

OPTIONS = (
    Option(
        ENABLE_OPTION,
        "Enable the plugin.",
        parsers.boolean,
        f"{', '.join(TRUE)} and {', '.join(FALSE)}",
        is_switch=True,
        is_preference=True,
        variable="COCODIFF_ENABLE",
    ),
    Option(
        "cocodiff_topology",
        f"Topology of a Ulysses group, or with --ring_degree of all ranks that share a sequence: {NOTATION}. Default: "
        "detected from the launcher.",
        parsers.topology,
        "[topology](topology.md)",
    ),
    Option(
        "cocodiff_ring",
        "Placement with --ring_degree: 'outer' (default, as in xDiT) lays the ring across the slowest axis, 'inner' "
        "the Ulysses group. `cocodiff plan --model` predicts which is faster.",
        choices=PLACEMENTS,
        ignored=_WITHOUT_RING,
    ),
    Option(
        "cocodiff_a2a",
        f"Plan of the all-to-all: {plans.NOTATION}, or {AUTO!r} (default): the planner chooses one for each message "
        f"size. In lossy modes a plan without {plans.GATHER} sends Q, K, V and O by heads.",
        parsers.plan,
        f"{AUTO!r}, or a [plan](plans.md)",
    ),
    Option(
        "cocodiff_profile",
        "Link profile for the planner, written by `cocodiff probe --json`. Default: links are probed at startup.",
        parsers.profile,
        "file",
    ),
    Option(
        "cocodiff_timeout",
        "Seconds after which an unresponsive rank ends the job with an error that names it. Default: the timeout of "
        "PyTorch's backend.",
        parsers.seconds,
        f"seconds above 0, up to {MAX_SECONDS:g}",
    ),
    Option(
        "cocodiff_v_first",
        "Send V before Q and K are computed: 'on', 'off', or 'auto' (default): if the planner predicts a gain and "
        "timed steps confirm it.",
        parsers.v_first,
        choices=(AUTO, "on", OFF),
    ),
    Option(
        "cocodiff_head_groups",
        "Number of groups into which the heads of a rank are split, so that one attends while others are sent. Only in "
        f"exact mode or where K and V are gathered, and outside of compiled graphs. {AUTO!r} (default): numbers that "
        "the planner expects to pay are tried on accelerators, and timed steps choose; 1 on CPUs.",
        parsers.head_groups,
        f"{AUTO!r} and numbers from 1",
    ),
    Option(
        "cocodiff_mode",
        f"Compression on slow axes: 'exact' is lossless; 'balanced' keeps the mean error at {modes.BALANCED.error:g} "
        f"(FP8), 'fast' at {modes.FAST.error:g} (FP4); 'paper' is V-Major. Default: {MULTI_NODE_MODE!r} if ranks of a "
        "sequence are on several nodes and for virtual ranks, otherwise 'exact'.",
        choices=MODES,
        removed={"auto": "the bits of all modes follow from their error; use 'balanced'"},
    ),
    Option(
        "cocodiff_schedule",
        "Changes to how the mode codes values, such as 'bits=2' for the same bits at all steps.",
        parsers.schedule,
        "[settings](compression.md#change-how-values-are-coded)",
    ),
    Option(
        "cocodiff_slow_axes",
        f"Axes on which a mode may be lossy, such as 'node,gpu', or {AUTO!r}: those measured as slow. Default: "
        f"{AUTO!r}, on CPUs 'node'; for virtual ranks, all axes but the innermost.",
        parsers.slow_axes,
        f"{AUTO!r}, or axes",
        ignored=_IN_EXACT,
    ),
    Option(
        "cocodiff_virtual",
        "Topology of virtual ranks: one rank with --ulysses_degree 1 applies the compression of that many, to evaluate "
        "quality. 'ring:TOPOLOGY' simulates a ring.",
        parsers.virtual,
        "[topology](topology.md)",
    ),
    Option(
        "cocodiff_error",
        "Mean error of what crosses slow axes, relative to its norm, that bits are chosen for. Default: the mode's.",
        parsers.error,
        modes.ERRORS,
    ),
    Option(
        "cocodiff_memory_budget",
        "GiB of link references on each rank. Default: free memory less a reserve; no limit on CPUs.",
        parsers.memory,
        "GiB above 0, such as 2.5",
        ignored=_IN_EXACT,
    ),
    Option(
        "cocodiff_kernels",
        f"Kernels of the codecs. {AUTO!r} (default): Triton on accelerators where it can build, otherwise PyTorch.",
        parsers.kernels,
        choices=kernels.CHOICES,
        removed={"numba": "'torch' serves CPUs"},
    ),
    Option(
        "cocodiff_cache",
        f"Folder that caches link profiles and tuned schedules for later runs; {OFF!r} disables it. Default: "
        "~/.cache/cocodiff.",
        parsers.cache,
        f"a folder and {OFF!r}",
        is_preference=True,
    ),
    Option(
        SHARE_FIELD,
        "Several ranks share one device, and messages go through host memory. Default: detected if a node has more "
        "ranks than devices.",
        is_switch=True,
        is_preference=True,
        variable=SHARE_VARIABLE,
    ),
)
"""All options, in the order of documentation."""


def _removed(field: str, successor: str) -> Option:
    def parse(text: str) -> NoReturn:
        raise ValueError(f"the option was removed: {successor}")

    return Option(field, successor, parse)


REMOVED_OPTIONS = (
    _removed("cocodiff_max_ctas", "set NCCL_MAX_CTAS, which NCCL reads"),
    _removed("cocodiff_max_error", "set --cocodiff_error, the mean error of a run"),
)
"""Options that the version before this one had; an error says what holds instead."""
