"""Choice between the Triton and PyTorch kernels, which encode and decode the tensors of a message."""

import functools
import importlib
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch

from xfuser_cocodiff.engine.codec.rows import MessagePart
from xfuser_cocodiff.engine.topology import devices

AUTO, TRITON, TORCH = "auto", "triton", "torch"
CHOICES = (AUTO, TRITON, TORCH)


_selected = [AUTO]


def use(choice: str) -> None:
    """Select the kernel backend of this process, one of CHOICES."""
    _selected[0] = choice


def resolve(choice: str, device_type: str) -> str:
    """Return the backend that a choice selects on a device type.

    Raises:
        ValueError: the chosen backend is not available there.
    """
    if choice == TRITON and (reason := _triton_unavailable(device_type)):
        raise ValueError(f"{choice!r} is not available: {reason}; valid are {AUTO!r} and {TORCH!r}")
    if choice != AUTO:
        return choice
    is_preferred = devices.capabilities(device_type).uses_triton
    return TRITON if is_preferred and not _triton_unavailable(device_type) else TORCH


def explain(choice: str, device_type: str) -> str:
    """Return the backend that a choice selects on a device type, and why, in a few words."""
    backend = resolve(choice, device_type)
    if choice != AUTO:
        return f"{backend} (--cocodiff_kernels)"
    if backend == TORCH and devices.capabilities(device_type).uses_triton:
        return f"{backend} (Triton: {_triton_unavailable(device_type)})"
    return f"{backend} (default on {device_type})"


def _triton_unavailable(device_type: str) -> str | None:
    """Return why Triton's kernels cannot run on a device type, or None if they can."""
    if not _is_installed():
        return "it is not installed"
    if devices.capabilities(device_type).uses_triton:
        return None if _can_build() else "it needs a C compiler and Python's headers to build its launchers"
    if os.environ.get("TRITON_INTERPRET") == "1":  # slow, on any device
        return None
    return f"it has no driver for {device_type!r}"


@functools.cache  # called for every message, and the check reads the file system
def _is_installed() -> bool:
    """Return whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _can_build() -> bool:
    """Return whether Triton finds the compiler and headers that it needs at the first launch."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return bool(compiler) and Path(sysconfig.get_path("include"), "Python.h").exists()


def backend_for(device: torch.device) -> str:
    """Return the backend that this process uses on a device."""
    selected = _selected[0]
    return resolve(AUTO, device.type) if selected == AUTO else selected


_MODULES = {TRITON: "triton_kernels", TORCH: "torch_kernels"}


def _kernels(device: torch.device) -> ModuleType:
    """Return the module of the backend that this process uses on a device."""
    return _module(_MODULES[backend_for(device)])


@functools.cache  # called for every message
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.{name}")


def encode(parts: Sequence[MessagePart], energies: torch.Tensor) -> None:
    """Encode the tensors of a message as quantized residuals to their predictions.

    Args:
        parts: the tensors, all on one device. Their payloads, new references and gains are written.
        energies: float32 (number of parts, 2), written: the sum of squared reconstruction errors, not finite if the
            values are not, and that of the values themselves; with a base the error is that of the difference.
    """
    _kernels(energies.device).encode(parts, energies)


def decode(parts: Sequence[MessagePart]) -> None:
    """Decode payloads, as :func:`encode` writes them, into the values of each part, except for the local slots.

    Args:
        parts: as passed to :func:`encode`, but for the values. None may need the decoded values of another. Their new
            references are written too.
    """
    _kernels(parts[0].values.device).decode(parts)
