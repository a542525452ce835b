"""Warnings about options and variables that have no effect."""

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig
from xfuser_cocodiff.xdit.settings.option import Option, given_options
from xfuser_cocodiff.xdit.settings.options import ENABLE_OPTION, OPTIONS
from xfuser_cocodiff.xdit.settings.variables import OTHER_VARIABLES

_PREFIX = "COCODIFF_"


def warnings(values: Mapping[str, Any], environment: Mapping[str, str], config: CocoDiffConfig | None) -> list[str]:
    """Return a warning for each reason for which options that the user set have no effect, and each unknown variable.

    Args:
        values: option fields as parsed; None or False means not given.
        environment: environment variables of the process.
        config: config that the options resolve to; None if the plugin is not enabled.
    """
    sources: dict[str, list[str]] = {}
    for option, _, source in given_options(OPTIONS, values, environment).values():
        if reason := _reason(option, config):
            sources.setdefault(reason, []).append(source)
    ignored = [f"{', '.join(names)}: no effect {reason}" for reason, names in sources.items()]
    return [*_unknown_variables(environment), *ignored]


def _reason(option: Option, config: CocoDiffConfig | None) -> str | None:
    """Return the reason for which an option has no effect; None if it has one."""
    if config is None:
        return None if option.is_preference else f"without --{ENABLE_OPTION}"
    return option.ignored.reason if option.ignored and option.ignored.holds(config) else None


def _unknown_variables(environment: Mapping[str, str]) -> Iterator[str]:
    variables = (*(option.variable for option in OPTIONS), *OTHER_VARIABLES)
    known = sorted(name.removeprefix(_PREFIX) for name in variables)
    for name in sorted(environment):
        if name.startswith(_PREFIX) and name not in variables:
            nearest = difflib.get_close_matches(name.removeprefix(_PREFIX), known, 1)
            hint = f"; the nearest is {_PREFIX}{nearest[0]}" if nearest else ""
            yield f"{name} is not a variable of the plugin{hint}"
