"""Kernels that score, encode and decode rows of values for the codecs, as Triton, Numba and PyTorch backends.
Input: tensors of any strides, the prediction that both ends of a link share, and the bits per value.
Output: payload bytes, decoded values, new link references and their error.
Public: `scores`, `encode`, `decode`, `use`, `resolve`, `prepare`, `rows.Prediction`, `rows.ActiveTokens`,
`rows.Base`.
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

from xfuser_cocodiff.engine.kernels.rows import ActiveTokens, Base, EncodeResult, Prediction, check_base
from xfuser_cocodiff.engine.topology import devices

AUTO, TRITON, NUMBA, TORCH = "auto", "triton", "numba", "torch"
CHOICES = (AUTO, TRITON, NUMBA, TORCH)


_selected = [AUTO]


def use(choice: str) -> None:
    """Select the kernel backend of this process, one of CHOICES."""
    _selected[0] = choice


def resolve(choice: str, device_type: str) -> str:
    """Return the backend that a choice selects on a device type.

    Raises:
        ValueError: the chosen backend is not available there.
    """
    unavailable = {TRITON: _triton_unavailable, NUMBA: _numba_unavailable}
    if choice in unavailable and (reason := unavailable[choice](device_type)):
        raise ValueError(f"{choice!r} is not available: {reason}; valid are {AUTO!r} and {TORCH!r}")
    if choice != AUTO:
        return choice
    preferred = TRITON if devices.capabilities(device_type).uses_triton else NUMBA
    return TORCH if unavailable[preferred](device_type) else preferred


def _numba_unavailable(device_type: str) -> str | None:
    """Return why Numba's kernels cannot run on a device type, or None if they can."""
    if device_type != "cpu":
        return f"its kernels run on CPUs only, not on {device_type!r}"
    return None if _is_installed("numba") else "it is not installed"


def _triton_unavailable(device_type: str) -> str | None:
    """Return why Triton's kernels cannot run on a device type, or None if they can."""
    if not _is_installed("triton"):
        return "it is not installed"
    if devices.capabilities(device_type).uses_triton:
        return None if _can_build() else "it needs a C compiler and Python's headers to build its launchers"
    if os.environ.get("TRITON_INTERPRET") == "1":  # slow, on any device
        return None
    return f"it has no driver for {device_type!r}"


@functools.cache  # called for every tensor that is sent, and the check reads the file system
def _is_installed(package: str) -> bool:
    """Return whether a package can be imported."""
    if package != "numba":
        return importlib.util.find_spec(package) is not None
    try:  # Numba refuses to be imported with a NumPy version that it does not support
        importlib.import_module(package)
    except ImportError:
        return False
    return True


@functools.cache
def _can_build() -> bool:
    """Return whether Triton finds the compiler and headers that it needs at the first launch."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return bool(compiler) and Path(sysconfig.get_path("include"), "Python.h").exists()


def prepare(choice: str, device_type: str) -> None:
    """Compile or load the kernels of a choice, so that the first message does not wait for it."""
    if resolve(choice, device_type) == NUMBA:
        from xfuser_cocodiff.engine.kernels import numba_kernels

        numba_kernels.prepare()


def backend_for(device: torch.device) -> str:
    """Return the backend that this process uses on a device."""
    selected = _selected[0]
    return resolve(AUTO, device.type) if selected == AUTO else selected


_MODULES = {TRITON: "triton_kernels", NUMBA: "numba_kernels", TORCH: "torch_kernels"}


def _kernels(device: torch.device) -> ModuleType:
    """Return the module of the backend that this process uses on a device."""
    return _module(_MODULES[backend_for(device)])


@functools.cache  # called for every tensor of a message
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")


def scores(
    values: torch.Tensor, prediction: Prediction, local_slots: range | None = None, base: Base | None = None
) -> torch.Tensor:
    """Return the squared distance of each token from its prediction, summed over heads and dims.

    Args:
        values: (P, G, H, T, D), of any strides.
        prediction: inputs of the prediction, the same at both ends.
        local_slots: slots of this rank, which are skipped; None for none.
        base: values whose difference is scored; None to score the values themselves.

    Returns:
        float32 (L, G, T).

    Raises:
        ValueError: a base that does not fit the values.
    """
    if base is not None:
        check_base(base, 1, values, local_slots)
    return _kernels(values.device).scores(values, prediction, local_slots, base)


def encode(
    values: torch.Tensor,
    prediction: Prediction | None,
    bits: float | None,
    active: ActiveTokens | None,
    payload: torch.Tensor,
    local_slots: range | None = None,
    sends_gain: bool = False,
    base: Base | None = None,
) -> EncodeResult:
    """Encode values as the quantized residual to their prediction, and write the payload.

    Args:
        values: (P, G, H, T, D), of any strides.
        prediction: inputs of the prediction, the same at both ends; None to send all values unchanged. The reference
            then has zeros where values are not finite.
        bits: bits per value of the residual, one of quantize.GRIDS; None to send the values themselves.
        active: tokens that are sent; None for all.
        payload: uint8 (P, n), written except for the local slots: the levels of all rows, then their scales; with
            `bits` None the values. Rows may have gaps between them and begin at a multiple of a value's size.
        local_slots: slots of this rank, which are skipped; None for none.
        sends_gain: whether the payload ends with GAIN_BYTES bytes that carry the gain.
        base: values whose difference is encoded; the prediction is one of the difference. None to encode the values
            themselves. The payload has the same form.

    Raises:
        ValueError: a base that does not fit the values, or with `bits` None.
    """
    if base is not None:
        check_base(base, bits, values, local_slots)
    return _kernels(values.device).encode(values, prediction, bits, active, payload, local_slots, sends_gain, base)


def decode(
    payload: torch.Tensor,
    prediction: Prediction | None,
    bits: float | None,
    active: ActiveTokens | None,
    target: torch.Tensor,
    local_slots: range | None = None,
    sends_gain: bool = False,
    base: Base | None = None,
) -> torch.Tensor:
    """Decode a payload into the target.

    Args:
        payload: uint8 (P, n), as :func:`encode` writes it.
        prediction: the sender's; with `sends_gain` its gains are read from the payload instead.
        bits: as passed to :func:`encode`.
        active: the sender's active tokens.
        target: (P, G, H, T, D), of any strides; the values are written here, except for the local slots.
        local_slots: slots of this rank, which are skipped; None for none.
        sends_gain: as passed to :func:`encode`.
        base: values that are added to the decoded difference, such as the decoded values of the sender's base; the sum
            is computed in float32 and rounded to the target's type. None if the sender had none.

    Returns:
        The receiver's new link reference, (L, G, H, T, D); with a base, the decoded difference.

    Raises:
        ValueError: a base that does not fit the target, or with `bits` None.
    """
    if base is not None:
        check_base(base, bits, target, local_slots)
    return _kernels(payload.device).decode(payload, prediction, bits, active, target, local_slots, sends_gain, base)
