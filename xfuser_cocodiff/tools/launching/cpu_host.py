"""xDiT on a machine without an accelerator, for the demo, tests and continuous integration.

The CPU takes the place of CUDA: its clock and memory behind torch.cuda, its attention, and Ray
with virtual GPUs.
`xfuser_cocodiff.install` is the only place that loads this file, and does so where PyTorch finds no accelerator.
"""

import contextlib
import functools
import importlib.util
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from xfuser_cocodiff.xdit.patching.log import info_once
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.patching.symbol_lookup import without
from xfuser_cocodiff.xdit.platforms import attention_kernels, platform
from xfuser_cocodiff.xdit.platforms.platform import Platform

NUM_GPUS = 64
"""Number of Ray's virtual GPUs; more than the workers of one machine."""
_GIVEN_BY = ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES")
"""Environment variables that name a Ray cluster, or the GPUs that it may use."""
_LONG_CONTEXT = "xfuser.core.long_ctx_attention"
_RING = f"{_LONG_CONTEXT}.ring.ring_flash_attn"
_WITHOUT_LONG_CONTEXT = without(_RING, "runnable_attn_type")
"""Condition of patches: long-context attention needs CUDA. The series in patches/ adds the symbol."""


class CPU(Platform):
    """The CPU, which all ranks share."""

    def device(self, index: int | None = None) -> torch.device:
        """Return the CPU for any index."""
        return torch.device("cpu")


def cpu_platform() -> CPU:
    """Return the CPU as a platform for xDiT."""
    return CPU(
        device_type="cpu",
        backend=lambda: dist.get_default_backend_for_device("cpu"),
        cuda={
            "Event": CPUEvent,
            "current_device": _constant(lambda: torch.device("cpu")),  # callers create tensors on it
            "synchronize": _constant(_nothing),
            "set_device": _constant(_nothing),
            "reset_peak_memory_stats": _constant(reset_peak_memory),
            "max_memory_allocated": _constant(peak_memory),
            "max_memory_reserved": _constant(peak_memory),
            "memory_allocated": _constant(lambda: _resident_bytes("VmRSS")),
            "memory_reserved": _constant(lambda: _resident_bytes("VmRSS")),
        },
    )


def patches() -> list[Patch]:
    """Return the patches with which xDiT runs on CPUs."""
    cpu, envs = cpu_platform(), functools.partial(Patch, "xfuser.envs", condition=platform.WITHOUT_SUPPORT)
    return [
        envs("_is_cuda", "a CUDA build runs on a machine without a GPU", platform.never),
        envs("_is_hip", "a ROCm build runs on a machine without a GPU", platform.never),
        *platform.for_environment(cpu),
        *platform.for_groups(),
        *platform.for_scripts(cpu),
        *attention_kernels.patches(flash_attention),
        *_for_long_context(),
        *_for_ray(),
    ]


def _constant(call: Callable) -> Callable:
    """Return a new function that ignores its arguments: torch.compile needs a different object for each name."""
    return lambda *_, **__: call()


def _nothing() -> None:
    """Replace a call that has no effect on a CPU."""


# torch.cuda's timers and memory statistics.


class CPUEvent:
    """A torch.cuda.Event on the clock of the CPU."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._time: float | None = None

    def record(self, *_: Any) -> None:
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        """Return at once: work on the CPU is synchronous."""

    def query(self) -> bool:
        return True

    def wait(self, *_: Any) -> None:
        """Return at once: the CPU has no streams."""

    def elapsed_time(self, end: "CPUEvent") -> float:
        """Return the time from this event to `end`, in milliseconds."""
        return (end._time - self._time) * 1000


def peak_memory() -> int:
    """Return the largest resident size of this process since the last reset, in bytes."""
    return _resident_bytes("VmHWM")


def reset_peak_memory() -> None:
    """Reset the peak, where the operating system supports it."""
    with contextlib.suppress(OSError):  # otherwise the peak is that since the process started
        Path("/proc/self/clear_refs").write_text("5")


def _resident_bytes(name: str) -> int:
    """Return a figure of Linux about this process; elsewhere the largest resident size since it started."""
    try:
        return 1024 * int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0])
    except (OSError, IndexError):  # no such file, or a sandbox whose file has no such line
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


# Attention: that of PyTorch in the place of flash-attn.


_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    attention_kwargs: dict | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute O and its LSE on a CPU, as :func:`attention_kernels.sdpa_with_lse`; O is bit-identical to that of
    `scaled_dot_product_attention`."""
    mask = attention_kernels.added_mask(attention_kwargs, query.dtype)
    return _flash_attention(query, key, value, dropout_p, is_causal, attn_mask=mask)


def _for_long_context() -> list[Patch]:
    """Return the patches with which xDiT's long-context attention (StepVideo, Sana) can be imported and run."""
    add = functools.partial(Patch, condition=_WITHOUT_LONG_CONTEXT)
    why = "modules import yunchang with CUDA or an NPU only"
    return [
        Patch("xfuser.envs", "_is_npu", why, _importing_yunchang, condition=platform.WITHOUT_SUPPORT),
        add(_RING, "select_flash_attn_impl", "flash-attn needs CUDA", _with_torch_attention),
        add(
            "xfuser.model_executor.layers.attention_processor",
            "AttnType",
            "Sana asks yunchang for a type that has been renamed",
            _with_torch_type,
        ),
    ]


def _importing_yunchang(original: Callable) -> Callable:
    """Return a check for NPUs that is true while the modules of long-context attention are executed."""

    @functools.wraps(original)
    def _is_npu() -> Any:
        caller = sys._getframe(1)
        if caller.f_code.co_name != "<module>" or not caller.f_globals["__name__"].startswith(_LONG_CONTEXT):
            return original()
        from yunchang.ring import utils

        if not hasattr(utils, "update_npu_out"):  # yunchang 0.6.4 has none, and only NPUs would call it
            utils.update_npu_out = None
        return True

    return _is_npu


def _with_torch_attention(select: Callable) -> Callable:
    """Return yunchang's choice of attention, with PyTorch's in the place of flash-attn, the default."""

    @functools.wraps(select)
    def select_flash_attn_impl(impl_type: Any, *args: Any, **kwargs: Any) -> Callable:
        from yunchang.kernels import AttnType

        is_served = impl_type in (AttnType.FA, AttnType.TORCH_MATH)
        return _long_context_attention if is_served else select(impl_type, *args, **kwargs)

    return select_flash_attn_impl


def _long_context_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute O, shape (B, S, H, D) as Q, K and V, and its LSE, by which a ring merges blocks; yunchang's has none."""
    by_heads = (tensor.transpose(1, 2) for tensor in (query, key, value))
    output, lse = _flash_attention(*by_heads, dropout_p, causal, scale=softmax_scale)
    return output.transpose(1, 2), lse


def _with_torch_type(types: Any) -> Any:
    """Add the old name of PyTorch's attention to yunchang's types."""
    if not hasattr(types, "TORCH"):
        types.TORCH = types.TORCH_MATH
    return types


# Ray with virtual GPUs, which xDiT's workers request.


def _for_ray() -> list[Patch]:
    """Return the patch of `ray.init`, if Ray is installed."""
    is_installed = importlib.util.find_spec("ray") is not None
    return [Patch("ray", "init", "xDiT's workers ask for GPUs", _with_gpus)] if is_installed else []


def _with_gpus(original: Callable) -> Callable:
    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> Any:
        given = args or kwargs.get("address") or kwargs.get("num_gpus") is not None
        if given or any(name in os.environ for name in _GIVEN_BY):
            return original(*args, **kwargs)
        try:
            context = original(**{**kwargs, "num_gpus": NUM_GPUS})
        except ValueError:  # a running cluster has its own number of GPUs
            return original(**kwargs)
        info_once(f"Ray starts with {NUM_GPUS} virtual GPUs, which xDiT's workers request; they run on the CPU")
        return context

    return init
