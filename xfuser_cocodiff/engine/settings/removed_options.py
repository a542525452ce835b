"""Values of options that the version before this one had; an error says what holds instead."""

from collections.abc import Mapping
from typing import Any

REMOVED_VALUES = {
    ("cocodiff_kernels", "numba"): "'torch' serves CPUs",
}
"""What holds in place of a value of an option, by field and value."""


def check(given: Mapping[str, tuple[Any, str]]) -> None:
    """Check that no option has a value that was removed.

    Args:
        given: value of each option, and the flag or variable that sets it, by field.

    Raises:
        ValueError: names the flag or variable, its value and what holds instead.
    """
    for field, (value, source) in given.items():
        if successor := REMOVED_VALUES.get((field, value)):
            raise ValueError(f"{source}: {value!r} was removed: {successor}")
