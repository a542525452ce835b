"""What of the options has no effect, in words for the user: nothing that was said is left aside in silence."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from xfuser_cocodiff.engine.settings.config import CocoDiffConfig, given_options
from xfuser_cocodiff.engine.settings.options import ENABLE_OPTION, EXACT, OPTIONS, OTHER_VARIABLES
from xfuser_cocodiff.engine.topology import launcher

_PREFIX = "COCODIFF_"
_SHARED = launcher.SHARE_FIELD.removeprefix("cocodiff_")
"""The one option that acts without the plugin's being asked for."""
_PREFERENCES = (_SHARED, "cache")
"""Options that may well be set for good, asked for or not."""
_APPROXIMATING = ("slow_axes", "max_error", "memory_budget")
_TRAVELLING = ("topology", "ring", "a2a", "timeout", "v_first", "head_groups")


def warnings(
    values: Mapping[str, Any], environment: Mapping[str, str], config: CocoDiffConfig | None, ring_degree: int
) -> list[str]:
    """What the user said in vain.

    Args:
        values: option fields as parsed; None or False means not given.
        environment: of the process.
        config: what came of them.
        ring_degree: Ring degree.
    """
    sources = {field.removeprefix("cocodiff_"): source for field, source in given_options(values, environment).items()}
    found = list(_unknown(environment))
    if config is None:
        alone = [source for name, source in sources.items() if name not in (ENABLE_OPTION, *_PREFERENCES)]
        return [*found, f"{', '.join(alone)}: no effect without --{ENABLE_OPTION}"] if alone else found

    def vain(names: tuple[str, ...], why: str) -> Iterator[str]:
        if said := [sources[name] for name in names if name in sources]:
            yield f"{', '.join(said)}: no effect {why}"

    if config.virtual:
        found += vain(_TRAVELLING, "with --cocodiff_virtual: one rank does not communicate")
    elif ring_degree == 1:
        found += vain(("ring",), "without --ring_degree above 1")
    if config.mode == EXACT:
        found += vain(_APPROXIMATING, f"in mode {EXACT!r}")
    return found


def _unknown(environment: Mapping[str, str]) -> Iterator[str]:
    variables = (*(option.variable for option in OPTIONS), *OTHER_VARIABLES)
    known = sorted(name.removeprefix(_PREFIX) for name in variables)
    for name in sorted(environment):
        if name.startswith(_PREFIX) and name not in variables:
            nearest = difflib.get_close_matches(name.removeprefix(_PREFIX), known, 1)
            hint = f"; the nearest is {_PREFIX}{nearest[0]}" if nearest else ""
            yield f"{name} is not a variable of the plugin{hint}"
