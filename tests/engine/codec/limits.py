"""Limits of what Triton's compiler makes of the kernels, by Triton."""

from typing import NamedTuple


class Limits(NamedTuple):
    """Limits of the kernels of one Triton: what was measured, at most, for sm_80, sm_90 and sm_100."""

    registers: int
    """Registers of a thread, at most."""
    spilled: int
    """Bytes that a thread spills, at most."""
    access: str
    """Widest access to memory, in PTX: v4.b32 has 16 bytes."""
    encode_instructions: int
    """Instructions of the encoder's longest loop per bf16 value, at most."""
    decode_instructions: int
    """Those of the decoder."""


LIMITS = {
    "3.4": Limits(64, 0, "v4.b32", 99, 60),
    "3.5": Limits(64, 0, "v4.b32", 100, 61),
    "3.6": Limits(64, 0, "v4.b32", 99, 61),
    "3.7": Limits(64, 0, "v4.b32", 102, 62),
    "3.8": Limits(64, 0, "v4.b32", 101, 62),
    "3.9": Limits(64, 0, "v4.b32", 101, 64),
}
"""Limits by Triton, oldest first."""


def limits_of(version: str) -> Limits:
    """Return the limits for a Triton, such as 3.9.0; those of the newest for one that is not listed."""
    *_, newest = LIMITS.values()
    return LIMITS.get(".".join(version.split(".")[:2]), newest)
