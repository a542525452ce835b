"""Work on rows of values, done once for each: scored, coded, decoded, moved. One interface, two sets of kernels.

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
from typing import NamedTuple

import torch

AUTO, TRITON, TORCH = "auto", "triton", "torch"
CHOICES = (AUTO, TRITON, TORCH)
TRITON_DEVICES = ("cuda", "xpu")
"""Where Triton's kernels are used unless something else is asked for."""


class Coded(NamedTuple):
    """What came of values."""

    payload: torch.Tensor
    """uint8 (L, n): scales of all rows, then their levels; values as they are where bits is None."""
    held: torch.Tensor
    """What the receiver makes of it, (L, G, H, T, D)."""
    lacking: torch.Tensor
    """Sum of squares of what it lacks; not finite where the values are not."""
    wanted: torch.Tensor
    """Sum of squares of the values."""


_wanted = [AUTO]


def use(choice: str) -> None:
    """Choose kernels for this process: one of CHOICES."""
    _wanted[0] = choice


def resolved(choice: str, device_type: str) -> str:
    """Which set a choice means on a device.

    Raises:
        ValueError: Triton is asked for where it cannot be had.
    """
    if choice == TORCH or (choice == AUTO and device_type not in TRITON_DEVICES):
        return TORCH
    lacking = _lacking(device_type)
    if choice == TRITON and lacking:
        raise ValueError(f"{TRITON!r} is not valid here, since {lacking}; valid are {AUTO!r} and {TORCH!r}")
    return TORCH if lacking else TRITON


def _lacking(device_type: str) -> str | None:
    """What keeps Triton from running on a device; None where it runs."""
    if not _has_triton():
        return "it is not installed"
    if device_type in TRITON_DEVICES:
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


def scores(
    values: torch.Tensor, held: torch.Tensor, before: torch.Tensor | None, predictor: float, here: int | None = None
) -> torch.Tensor:
    """How far each token is from what is expected of it: sum of squares over heads and dims, float32 (L, G, T).

    Args:
        values: (P, G, H, T, D), of any strides.
        held: (L, G, H, T, D), contiguous.
        before: as `held`: what was held before that; None where nothing is extrapolated.
        predictor: how much of the last change is expected again.
        here: see above.
    """
    return _kernels(values.device).scores(values, held, before, predictor, here)


def encode(
    values: torch.Tensor,
    held: torch.Tensor,
    before: torch.Tensor | None,
    predictor: float,
    bits: int | None,
    chosen: torch.Tensor | None,
    here: int | None = None,
) -> Coded:
    """Code values by their difference to what is expected of them.

    Args:
        values: (P, G, H, T, D), of any strides.
        held: (L, G, H, T, D), contiguous, as `before`.
        before: see :func:`scores`.
        predictor: see :func:`scores`.
        bits: one of quantise.STEPS; None sends the values themselves.
        chosen: active tokens, int64 (L, G, k), ascending; None stands for all.
        here: see above.
    """
    return _kernels(values.device).encode(values, held, before, predictor, bits, chosen, here)


def decode(
    payload: torch.Tensor,
    held: torch.Tensor,
    before: torch.Tensor | None,
    predictor: float,
    bits: int | None,
    chosen: torch.Tensor | None,
    target: torch.Tensor | None = None,
    here: int | None = None,
) -> torch.Tensor:
    """What the receiver holds from now on, (L, G, H, T, D).

    Args:
        payload: of :func:`encode`, rows of which may lie apart.
        held: of the receiver, as that of the sender.
        before: the same.
        predictor: see :func:`scores`.
        bits: as it was coded.
        chosen: the sender's.
        target: (P, G, H, T, D), of any strides: the values are written there too.
        here: see above.
    """
    return _kernels(payload.device).decode(payload, held, before, predictor, bits, chosen, target, here)


def move(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy values between tensors of one shape and dtype, of any strides."""
    if not torch.compiler.is_compiling() and is_fused(target.device):
        _kernels(target.device).move(target, source)
    else:
        target.copy_(source)


def away(values: torch.Tensor, here: int | None) -> torch.Tensor:
    """Values of all places but `here`."""
    return values if here is None else torch.cat([values[:here], values[here + 1 :]])


def put_away(target: torch.Tensor, values: torch.Tensor, here: int | None) -> None:
    """The inverse of :func:`away`: write values to all places but `here`."""
    if here is None:
        target.copy_(values)
    else:
        target[:here], target[here + 1 :] = values[:here], values[here:]
