"""Work on rows of values, done once for each: scored, encoded, decoded, moved.
In: tensors of any strides, what both ends hold of them, and how they are to be encoded.
Out: `scores`, `encode`, `decode`, `move`; `use` and `resolved`, which choose between two sets of kernels.

`reference` is plain PyTorch and runs everywhere; `fused` is Triton, for accelerators, and reads and writes each tensor
once. Both ends of a link must use the same set: their references agree because their arithmetic does.

Sizes in shapes: P places on slow axes, L of them on other ends of links, G groups of tokens, H heads, T tokens, D head
dim. Where a tensor has P places, `here` says which of them is the rank's own and left out, and L is P - 1; with None
there is no such place, and L is P.
"""

import functools
import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

from xfuser_cocodiff.kernels.rows import Active, Encoded, Known
from xfuser_cocodiff.machine import device as devices

AUTO, TRITON, TORCH = "auto", "triton", "torch"
CHOICES = (AUTO, TRITON, TORCH)
PAYS = 2**21
"""Bytes from which on a move is worth a launch of Triton's, which takes the host several times as long as PyTorch's."""


_wanted = [AUTO]


def use(choice: str) -> None:
    """Choose kernels for this process: one of CHOICES."""
    _wanted[0] = choice


def resolved(choice: str, device_type: str) -> str:
    """Which set a choice means on a device.

    Raises:
        ValueError: Triton is asked for where it cannot be had.
    """
    if choice == TORCH or (choice == AUTO and not devices.of(device_type).builds_triton):
        return TORCH
    lacking = _lacking(device_type)
    if choice == TRITON and lacking:
        raise ValueError(f"{TRITON!r} is not valid here, since {lacking}; valid are {AUTO!r} and {TORCH!r}")
    return TORCH if lacking else TRITON


def _lacking(device_type: str) -> str | None:
    """What keeps Triton from running on a device; None where it runs."""
    if not _has_triton():
        return "it is not installed"
    if devices.of(device_type).builds_triton:
        return None if _can_build() else "it has no C compiler, or none of Python's headers, to build with"
    if os.environ.get("TRITON_INTERPRET") == "1":  # slowly, on any device
        return None
    return f"it has no driver for {device_type!r}"


@functools.cache  # asked for every tensor that moves, and the answer takes a look at the disk
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _can_build() -> bool:
    """Whether there is what Triton builds its launchers with at their first use."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return bool(compiler) and Path(sysconfig.get_path("include"), "Python.h").exists()


def is_fused(device: torch.device) -> bool:
    """Whether Triton's kernels are used there."""
    wanted = _wanted[0]
    return wanted == TRITON or (wanted == AUTO and resolved(AUTO, device.type) == TRITON)


def _kernels(device: torch.device) -> ModuleType:
    if is_fused(device):
        from xfuser_cocodiff.kernels import fused

        return fused
    from xfuser_cocodiff.kernels import reference

    return reference


def scores(values: torch.Tensor, known: Known, here: int | None = None) -> torch.Tensor:
    """How far each token is from what is expected of it: sum of squares over heads and dims, float32 (L, G, T).

    Args:
        values: (P, G, H, T, D), of any strides.
        known: to both ends.
        here: see above.
    """
    return _kernels(values.device).scores(values, known, here)


def encode(
    values: torch.Tensor,
    known: Known | None,
    bits: float | None,
    active: Active | None,
    payload: torch.Tensor,
    here: int | None = None,
    tells: bool = False,
) -> Encoded:
    """Encode values by their difference to what is expected of them.

    Args:
        values: (P, G, H, T, D), of any strides.
        known: to both ends; None sends all values as they are, and holds zeros for those that are not finite.
        bits: one of quantise.GRIDS; None sends the values themselves.
        active: tokens that are sent; None stands for all.
        payload: uint8 (P, n), written but for the rank's own place: levels of all rows, then their scales; values as
            they are where bits is None. Its rows may lie apart, and begin at a multiple of the size of a value.
        here: see above.
        tells: whether rows.TOLD bytes more have the share of the last change that is expected again.
    """
    return _kernels(values.device).encode(values, known, bits, active, payload, here, tells)


def decode(
    payload: torch.Tensor,
    known: Known | None,
    bits: float | None,
    active: Active | None,
    target: torch.Tensor,
    here: int | None = None,
    tells: bool = False,
) -> torch.Tensor:
    """What the receiver holds from now on, (L, G, H, T, D).

    Args:
        payload: of :func:`encode`.
        known: as the sender has it, but for the shares where it tells them.
        bits: as it was encoded.
        active: the sender's.
        target: (P, G, H, T, D), of any strides: the values are written there too, but for the rank's own place.
        here: see above.
        tells: whether the sender does.
    """
    return _kernels(payload.device).decode(payload, known, bits, active, target, here, tells)


def move(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy values between tensors of one shape and dtype, of any strides."""
    if not torch.compiler.is_compiling() and target.nbytes >= PAYS and is_fused(target.device):
        _kernels(target.device).move(target, source)
    else:
        target.copy_(source)
