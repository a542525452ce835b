"""Options and values that the version before this one had; an error says what holds instead."""

from collections.abc import Mapping
from typing import Any

from xfuser_cocodiff.xdit.settings.options import Option

REMOVED_OPTIONS = (
    Option("cocodiff_max_ctas", "COCODIFF_MAX_CTAS", None, "set NCCL_MAX_CTAS, which NCCL reads"),
    Option("cocodiff_max_error", "COCODIFF_MAX_ERROR", None, "set --cocodiff_error, the mean error of a run"),
)
"""Options that were removed; their help says what holds instead."""
REMOVED_VALUES = {
    ("cocodiff_kernels", "numba"): "'torch' serves CPUs",
    ("cocodiff_mode", "auto"): "the bits of all modes follow from their error; use 'balanced'",
}
"""What holds in place of a value of an option, by field and value."""


def check(given: Mapping[str, tuple[Any, str]]) -> None:
    """Check that nothing is given that was removed.

    Args:
        given: value of each option, None if it is not given, and the flag or variable that sets it, by field.

    Raises:
        ValueError: names the flag or variable, its value and what holds instead.
    """
    for option in REMOVED_OPTIONS:
        value, source = given[option.field]
        if value is not None:
            raise ValueError(f"{source}: the option was removed: {option.help}")
    for (field, removed), successor in REMOVED_VALUES.items():
        value, source = given[field]
        if value == removed:
            raise ValueError(f"{source}: {value!r} was removed: {successor}")
