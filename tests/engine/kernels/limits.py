"""Limits of what the compiled kernels take, by Triton and GPU."""

from typing import NamedTuple


class Limits(NamedTuple):
    """Limits of the kernels for a GPU."""

    encode: int
    """Registers of a thread; the next three too. Ordering has one program per group, too few to fill a GPU."""
    decode: int
    scores: int
    order: int
    spilled: int
    """Bytes that a thread of the encoder spills; other kernels spill nothing."""
    encode_instructions: int
    """Instructions of the longest loop per bf16 value; the next two too."""
    decode_instructions: int
    scores_instructions: int


LIMITS = {
    "3.4": {
        80: Limits(64, 64, 40, 96, 0, 93, 34, 10),
        90: Limits(64, 56, 40, 105, 0, 95, 34, 10),
        100: Limits(64, 56, 39, 105, 0, 95, 34, 10),
    },
    "3.5": {
        80: Limits(64, 64, 40, 96, 0, 96, 34, 10),
        90: Limits(64, 64, 40, 106, 8, 95, 34, 10),
        100: Limits(64, 64, 40, 106, 0, 93, 32, 10),
    },
    "3.6": {
        80: Limits(64, 64, 40, 96, 0, 96, 34, 10),
        90: Limits(64, 64, 40, 101, 0, 98, 34, 10),
        100: Limits(64, 64, 40, 101, 0, 92, 32, 10),
    },
    "3.7": {
        80: Limits(64, 56, 40, 96, 0, 96, 31, 10),
        90: Limits(64, 56, 40, 104, 0, 96, 31, 10),
        100: Limits(64, 56, 39, 106, 8, 95, 30, 10),
    },
    "3.8": {
        80: Limits(64, 64, 40, 96, 32, 93, 29, 10),
        90: Limits(64, 56, 39, 105, 24, 95, 34, 10),
        100: Limits(64, 56, 40, 103, 8, 94, 32, 9),
    },
    "3.9": {
        80: Limits(64, 64, 40, 96, 16, 93, 29, 10),
        90: Limits(64, 56, 39, 106, 24, 97, 34, 10),
        100: Limits(64, 60, 40, 111, 8, 95, 32, 9),
    },
}
"""Limits by Triton, oldest first, and compute capability."""


def limits_of(version: str, capability: int) -> Limits:
    """Return the limits for a Triton, such as 3.9.0, and a GPU; those of the newest for one that is not listed."""
    *_, newest = LIMITS.values()
    return LIMITS.get(".".join(version.split(".")[:2]), newest)[capability]
