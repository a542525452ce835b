"""Kernels of the codecs over rows of values: scores, encoding, decoding.
Input: tensors of any strides, what both ends hold of them, and how they are to be encoded.
Public: `scores`, `encode`, `decode`; `use` and `resolve`, which choose between the sets of kernels.

`reference` is plain PyTorch and runs everywhere; `fused` is Triton, for accelerators, and `compiled` is Numba, for
CPUs: both read and write each tensor once. What one end of a link encodes, the other decodes to the same bits, whatever
set it uses: the encoder alone finds scales, in sums whose order sets differ in.

Sizes in shapes: P places on slow axes, L of them on other ends of links, G groups of tokens, H heads, T tokens, D head
dim. Where a tensor has P places, `here` says which of them are the rank's own and left out: some that follow each
other. L is the number of the others, and P where `here` is None.
"""

import functools
import importlib
import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

from xfuser_cocodiff.engine.kernels.rows import ActiveTokens, Encoded, Prediction
from xfuser_cocodiff.engine.topology import devices as devices

AUTO, TRITON, NUMBA, TORCH = "auto", "triton", "numba", "torch"
CHOICES = (AUTO, TRITON, NUMBA, TORCH)


_wanted = [AUTO]


def use(choice: str) -> None:
    """Choose kernels for this process: one of CHOICES."""
    _wanted[0] = choice


def resolve(choice: str, device_type: str) -> str:
    """Which set a choice means on a device.

    Raises:
        ValueError: one is asked for where it cannot be had.
    """
    lacking = {TRITON: _lacks_triton, NUMBA: _lacks_numba}
    if choice in lacking and (reason := lacking[choice](device_type)):
        raise ValueError(f"{choice!r} is not valid here, since {reason}; valid are {AUTO!r} and {TORCH!r}")
    if choice != AUTO:
        return choice
    usual = TRITON if devices.capabilities(device_type).uses_triton else NUMBA
    return TORCH if lacking[usual](device_type) else usual


def _lacks_numba(device_type: str) -> str | None:
    """What keeps Numba's kernels from running on a device; None where they run."""
    if device_type != "cpu":
        return f"its kernels are for CPUs, and not for {device_type!r}"
    return None if _has("numba") else "it is not installed"


def _lacks_triton(device_type: str) -> str | None:
    """What keeps Triton's kernels from running on a device; None where they run."""
    if not _has("triton"):
        return "it is not installed"
    if devices.capabilities(device_type).uses_triton:
        return None if _can_build() else "it has no C compiler, or none of Python's headers, to build with"
    if os.environ.get("TRITON_INTERPRET") == "1":  # slowly, on any device
        return None
    return f"it has no driver for {device_type!r}"


@functools.cache  # asked for every tensor that moves, and the answer takes a look at the disk
def _has(package: str) -> bool:
    if package != "numba":
        return importlib.util.find_spec(package) is not None
    try:  # it refuses to be imported beside a NumPy that it does not know
        importlib.import_module(package)
    except ImportError:
        return False
    return True


@functools.cache
def _can_build() -> bool:
    """Whether there is what Triton builds its launchers with at their first use."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return bool(compiler) and Path(sysconfig.get_path("include"), "Python.h").exists()


def prepare(choice: str, device_type: str) -> None:
    """Have what takes a while for the first values done before there are any."""
    if resolve(choice, device_type) == NUMBA:
        from xfuser_cocodiff.engine.kernels import numba_kernels

        numba_kernels.prepare()


def backend_for(device: torch.device) -> str:
    """The set that is used there."""
    wanted = _wanted[0]
    return resolve(AUTO, device.type) if wanted == AUTO else wanted


_MODULES = {TRITON: "triton_kernels", NUMBA: "numba_kernels", TORCH: "torch_kernels"}


def _kernels(device: torch.device) -> ModuleType:
    return _module(_MODULES[backend_for(device)])


@functools.cache  # asked for every tensor of an exchange
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")


def scores(values: torch.Tensor, known: Prediction, here: range | None = None) -> torch.Tensor:
    """How far each token is from what is expected of it: sum of squares over heads and dims, float32 (L, G, T).

    Args:
        values: (P, G, H, T, D), of any strides.
        known: to both ends.
        here: see above.
    """
    return _kernels(values.device).scores(values, known, here)


def encode(
    values: torch.Tensor,
    known: Prediction | None,
    bits: float | None,
    active: ActiveTokens | None,
    payload: torch.Tensor,
    here: range | None = None,
    tells: bool = False,
) -> Encoded:
    """Encode values by their difference to what is expected of them.

    Args:
        values: (P, G, H, T, D), of any strides.
        known: to both ends; None sends all values as they are, and holds zeros for those that are not finite.
        bits: one of quantise.GRIDS; None sends the values themselves.
        active: tokens that are sent; None stands for all.
        payload: uint8 (P, n), written but for the rank's own places: levels of all rows, then their scales; values as
            they are where bits is None. Its rows may lie apart, and begin at a multiple of the size of a value.
        here: see above.
        tells: whether rows.TOLD bytes more have the share of the last change that is expected again.
    """
    return _kernels(values.device).encode(values, known, bits, active, payload, here, tells)


def decode(
    payload: torch.Tensor,
    known: Prediction | None,
    bits: float | None,
    active: ActiveTokens | None,
    target: torch.Tensor,
    here: range | None = None,
    tells: bool = False,
) -> torch.Tensor:
    """What the receiver holds from now on, (L, G, H, T, D).

    Args:
        payload: of :func:`encode`.
        known: as the sender has it, but for the shares where it tells them.
        bits: as it was encoded.
        active: the sender's.
        target: (P, G, H, T, D), of any strides: the values are written there too, but for the rank's own places.
        here: see above.
        tells: whether the sender does.
    """
    return _kernels(payload.device).decode(payload, known, bits, active, target, here, tells)
