"""The options of the plugin, one row each: what it is called, how its value is read, and when it has no effect."""

from typing import NoReturn

from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.compression import modes
from xfuser_cocodiff.engine.compression.default_mode import EXACT, MODES, MULTI_NODE_MODE
from xfuser_cocodiff.xdit.settings import parsers
from xfuser_cocodiff.xdit.settings.config import AUTO
from xfuser_cocodiff.xdit.settings.option import Ignored, Option
from xfuser_cocodiff.xdit.settings.parsers import FALSE, MAX_SECONDS, OFF, TRUE
from xfuser_cocodiff.xdit.settings.ring_placement import PLACEMENTS

ENABLE_OPTION = "use_cocodiff"
"""Option that enables the plugin."""
SHARE_FIELD, SHARE_VARIABLE = "cocodiff_share_device", "COCODIFF_SHARE_DEVICE"
"""Option and environment variable that declare several ranks to share one device."""
_BOOLEANS = f"{', '.join(TRUE)} and {', '.join(FALSE)}"
_WITHOUT_RING = Ignored("without --ring_degree above 1", lambda config: config.ring_topology is None)
_IN_EXACT = Ignored(f"in mode {EXACT!r}", lambda config: config.mode == EXACT)

OPTIONS = (
    Option(
        ENABLE_OPTION,
        "Enable the plugin.",
        parsers.boolean,
        _BOOLEANS,
        is_switch=True,
        is_preference=True,
        variable="COCODIFF_ENABLE",
    ),
    Option(
        "cocodiff_topology",
        "Sizes of the axes, outermost first, such as node=2,gpu=4; default: detected.",
        parsers.topology,
        "[topology](topology.md)",
    ),
    Option(
        "cocodiff_ring",
        "Place of the ring: 'outer' (default) across nodes, 'inner' within them.",
        choices=PLACEMENTS,
        ignored=_WITHOUT_RING,
    ),
    Option(
        "cocodiff_a2a",
        f"Plan of the all-to-all, 'flat' or 'hierarchical'; {AUTO!r} (default): by message size.",
        parsers.plan,
        f"{AUTO!r}, or a [plan](plans.md)",
    ),
    Option(
        "cocodiff_profile",
        "Link profile from `cocodiff probe --json`; default: links are probed.",
        parsers.profile,
        "file",
    ),
    Option(
        "cocodiff_timeout",
        "Seconds until an unresponsive rank ends the job; default: PyTorch's timeout.",
        parsers.seconds,
        f"seconds above 0, up to {MAX_SECONDS:g}",
    ),
    Option(
        "cocodiff_v_first",
        f"Send V before Q and K exist; {AUTO!r} (default): where faster.",
        parsers.v_first,
        choices=(AUTO, "on", OFF),
    ),
    Option(
        "cocodiff_head_groups",
        f"Groups of heads; one attends while others are sent; {AUTO!r} (default): fastest.",
        parsers.head_groups,
        f"{AUTO!r}, or numbers from 1",
    ),
    Option(
        "cocodiff_mode",
        f"Compression on slow axes; default: {MULTI_NODE_MODE!r} across nodes, {EXACT!r} within one.",
        choices=MODES,
        removed={"auto": "the bits of all modes follow from their error; use 'balanced'"},
    ),
    Option(
        "cocodiff_schedule",
        "Changes to how the mode codes values, such as bits=2.",
        parsers.schedule,
        "[settings](modes.md#change-how-values-are-coded)",
    ),
    Option(
        "cocodiff_slow_axes",
        f"Axes that are compressed; {AUTO!r} (default): those measured as slow.",
        parsers.slow_axes,
        f"{AUTO!r}, or axes",
        ignored=_IN_EXACT,
    ),
    Option(
        "cocodiff_virtual",
        "Topology of virtual ranks on one rank, such as 2x2, or ring:2x2.",
        parsers.virtual,
        "[topology](topology.md)",
    ),
    Option(
        "cocodiff_error",
        "Mean error of what crosses slow axes; default: the mode's.",
        parsers.error,
        modes.ERRORS,
    ),
    Option(
        "cocodiff_memory_budget",
        "GiB of link references on each rank; default: by free memory.",
        parsers.memory,
        "GiB above 0, such as 2.5",
        ignored=_IN_EXACT,
    ),
    Option(
        "cocodiff_kernels",
        f"Kernels of the codecs; {AUTO!r} (default): Triton on accelerators, else PyTorch.",
        parsers.kernels,
        choices=kernels.CHOICES,
        removed={"numba": "'torch' serves CPUs"},
    ),
    Option(
        "cocodiff_cache",
        "Cache of link profiles and schedules; default: ~/.cache/cocodiff.",
        parsers.cache,
        f"a folder, or {OFF!r}",
        is_preference=True,
    ),
    Option(
        SHARE_FIELD,
        "Ranks share a device, through host memory; default: detected.",
        parsers.boolean,
        _BOOLEANS,
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
