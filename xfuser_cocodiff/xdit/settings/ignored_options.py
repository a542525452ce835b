"""Warnings about options and variables that have no effect."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from xfuser_cocodiff.engine.compression.mode_names import EXACT
from xfuser_cocodiff.engine.topology import launcher
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig, given_options
from xfuser_cocodiff.xdit.settings.options import ENABLE_OPTION, OPTIONS, OTHER_VARIABLES

_PREFIX = "COCODIFF_"
_PREFERENCES = (launcher.SHARE_FIELD.removeprefix("cocodiff_"), "cache")
"""Options that may be set permanently; the first one acts even without the plugin."""
_COMPRESSION = ("slow_axes", "memory_budget")
"""Options of lossy modes."""
_COMMUNICATION = ("topology", "ring", "a2a", "timeout", "v_first", "head_groups")
"""Options of communication between ranks."""


def warnings(
    values: Mapping[str, Any], environment: Mapping[str, str], config: CocoDiffConfig | None, ring_degree: int
) -> list[str]:
    """Return a warning for each group of options that the user set without effect.

    Args:
        values: option fields as parsed; None or False means not given.
        environment: environment variables of the process.
        config: config that the options resolve to; None if the plugin is not enabled.
        ring_degree: Ring degree.
    """
    sources = {field.removeprefix("cocodiff_"): source for field, source in given_options(values, environment).items()}

    def ignored(names: tuple[str, ...], reason: str) -> Iterator[str]:
        if given := [source for name, source in sources.items() if name in names]:
            yield f"{', '.join(given)}: no effect {reason}"

    messages = list(_unknown_variables(environment))
    if config is None:
        rest = tuple(name for name in sources if name not in (ENABLE_OPTION, *_PREFERENCES))
        return [*messages, *ignored(rest, f"without --{ENABLE_OPTION}")]
    if config.virtual:
        messages += ignored(_COMMUNICATION, "with --cocodiff_virtual: one rank does not communicate")
    elif ring_degree == 1:
        messages += ignored(("ring",), "without --ring_degree above 1")
    if config.mode == EXACT:
        messages += ignored(_COMPRESSION, f"in mode {EXACT!r}")
    return messages


def _unknown_variables(environment: Mapping[str, str]) -> Iterator[str]:
    variables = (*(option.variable for option in OPTIONS), *OTHER_VARIABLES)
    known = sorted(name.removeprefix(_PREFIX) for name in variables)
    for name in sorted(environment):
        if name.startswith(_PREFIX) and name not in variables:
            nearest = difflib.get_close_matches(name.removeprefix(_PREFIX), known, 1)
            hint = f"; the nearest is {_PREFIX}{nearest[0]}" if nearest else ""
            yield f"{name} is not a variable of the plugin{hint}"
