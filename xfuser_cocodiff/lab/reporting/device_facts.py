"""What a user of a device needs to know, for `cocodiff env`: device, driver, kernels, collectives and links."""

import functools
import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sysconfig
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.codec.codec import Codec
from xfuser_cocodiff.engine.codec.rows import Int8Rows, MessagePart, Prediction, rows_of

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Variable with the number of hardware queues of a CUDA device."""
_BITS = 2
_CODEC = Codec(bits=_BITS)
_SHAPE = 2, 1, 4, 64, 128
"""Sizes of the encoded values."""
_SECONDS = 60
"""Longest time of a vendor's tool."""
_NO_TOOL = "none: no GPU whose tools are known"
_COLORS = re.compile(r"\x1b\[[0-9;]*m")


class Vendor(NamedTuple):
    """Tools of a vendor."""

    links: tuple[str, ...]
    """Command that shows the links between devices."""
    driver: tuple[str, ...] = ()
    """Command that shows the driver's version; none where PyTorch knows it."""


_VENDORS = {
    "cuda": Vendor(("nvidia-smi", "topo", "-m"), ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")),
    "hip": Vendor(("rocm-smi", "--showtopo"), ("rocm-smi", "--showdriverversion", "--csv")),
    "xpu": Vendor(("xpu-smi", "topology", "-m")),
}


def device_facts(device: torch.device, backend: str) -> dict[str, str]:
    """Return what this machine has and what is missing, by name.

    Args:
        device: device of the tensors.
        backend: backend of torch.distributed for it.
    """
    vendor = "hip" if torch.version.hip and device.type == "cuda" else device.type
    return {
        "device": _device(device),
        "driver": _driver(device, vendor),
        "C compiler": _compiler(),
        "Python.h": _header(),
        "Triton": _triton(device),
        "kernels": _kernels(device),
        "collectives": _collectives(backend),
        CONNECTIONS: os.environ.get(CONNECTIONS, "not set"),
        "links": _links(vendor),
    }


def _device(device: torch.device) -> str:
    if device.type == "cpu":
        found = [tool for tool, *_ in (vendor.links for vendor in _VENDORS.values()) if shutil.which(tool)]
        hints = [f"; {tool} is installed: use a build of PyTorch for it" for tool in found]
        return f"cpu: PyTorch {torch.__version__} finds no GPU{''.join(hints)}"
    module = torch.get_device_module(device)
    name = f"{device.type}: {module.device_count()} x {module.get_device_name(0)}"
    if device.type != "cuda":
        return name
    major, minor = module.get_device_capability(0)
    return f"{name}, {module.get_device_properties(0).gcnArchName if torch.version.hip else f'sm_{major}{minor}'}"


def _driver(device: torch.device, vendor: str) -> str:
    if vendor not in _VENDORS:
        return _NO_TOOL
    if command := _VENDORS[vendor].driver:
        return ", ".join(dict.fromkeys(_output(command).splitlines()))
    return str(getattr(torch.get_device_module(device).get_device_properties(0), "driver_version", "unknown"))


def _compiler() -> str:
    found = shutil.which(os.environ.get("CC") or "gcc") or shutil.which("clang")
    return found or "missing: install gcc, with which Triton builds launchers"


def _header() -> str:
    file = Path(sysconfig.get_path("include"), "Python.h")
    return str(file) if file.exists() else f"missing: {file}; install Python's headers, which Triton needs as well"


def _triton(device: torch.device) -> str:
    """Return Triton's version, and why its kernels cannot run on a device."""
    try:
        triton = importlib.import_module("triton")
    except ImportError as error:
        return f"missing: {error}"
    try:
        kernels.resolve(kernels.TRITON, device.type)
    except ValueError as error:
        return f"{triton.__version__}, unused: {str(error).partition(': ')[2].partition(';')[0]}"
    return triton.__version__


def _kernels(device: torch.device) -> str:
    """Encode and decode a tensor on a device and return with which kernels, and whether that worked."""
    name, began = kernels.backend_for(device), time.monotonic()
    try:
        is_equal = _sends_bit_identically(device)
    except Exception as error:  # of a compiler, a driver or a launch
        reason = str(error).strip().partition("\n")[0]
        return f"{name}: failed ({type(error).__name__}: {reason}); runs use PyTorch's kernels, which are slower"
    if not is_equal:
        return f"{name}: wrong: sender and receiver have different references; please report it"
    return f"{name}: encode and decode ran within {time.monotonic() - began:.1f} s, compilation included"


def _sends_bit_identically(device: torch.device) -> bool:
    """Encode and decode a tensor and return whether sender and receiver get the same reference."""
    values = torch.randn(_SHAPE, device=device).to(torch.bfloat16)
    payload = torch.zeros(_SHAPE[0], _CODEC.payload_bytes(_SHAPE, values.dtype), dtype=torch.uint8, device=device)
    sent, received = (Int8Rows.empty(_SHAPE[0], *rows_of(_SHAPE), device) for _ in range(2))
    part = MessagePart(values, Prediction(), _BITS, payload, sent)
    kernels.encode([part], torch.empty(1, 2, device=device))
    kernels.decode([part._replace(values=torch.empty_like(values), new_reference=received)])
    return all(map(torch.equal, sent, received))


def _collectives(backend: str) -> str:
    """Return a backend and the version of its library."""
    if backend == "nccl":
        version = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "missing"
        return f"nccl, {'RCCL' if torch.version.hip else 'NCCL'} {version}"
    if backend in ("xccl", "ccl"):
        return f"{backend}, oneCCL {package_version('oneccl') or 'of the system'}"
    return backend


def _links(vendor: str) -> str:
    """Return the matrix of links that the vendor's tool shows, or why there is none."""
    return _output(_VENDORS[vendor].links) if vendor in _VENDORS else _NO_TOOL


@functools.cache
def _output(command: tuple[str, ...]) -> str:
    """Return what a command prints, or why it prints nothing."""
    if not shutil.which(command[0]):
        return f"unknown: {command[0]} is not installed"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"
    text = _COLORS.sub("", done.stdout).strip()
    return text if done.returncode == 0 and text else f"unknown: {' '.join(command)} exited with {done.returncode}"


def package_version(name: str) -> str | None:
    """Return the version of an installed package; None if it is absent."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
