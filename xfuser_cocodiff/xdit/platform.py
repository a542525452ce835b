"""Platforms that xDiT does not know: the CPU and Intel's XPU. CUDA, ROCm, MUSA, NPU and MPS are left to xDiT."""

import functools
import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from xfuser_cocodiff import launcher
from xfuser_cocodiff.xdit import host_clock, source
from xfuser_cocodiff.xdit.log import note
from xfuser_cocodiff.xdit.patch import Patch

_FACADE_WHY = "xDiT calls torch.cuda directly"
_XDITS_OWN = ("xfuser.envs", "supports_usp")
"""What an xDiT has that runs on CPU and XPU by itself: the series in patches/ brings it."""


@dataclass(frozen=True)
class Platform:
    """A device type for xDiT to run on, and what stands in for torch.cuda there."""

    device_type: str
    backend: Callable[[], str]
    """Name of the torch.distributed backend."""
    cuda: Mapping[str, Any]
    """Replacements in torch.cuda, by name."""

    def device(self, index: int | None = None) -> torch.device:
        """The device of a local rank; the CPU has one for all."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.device_type, None if index is None else launcher.device_index(index, os.environ))

    def translate(self, value: Any) -> Any:
        """Turn what names a CUDA device into this platform's; anything else stays as it is."""
        if isinstance(value, str) and value.partition(":")[0] == "cuda":
            value = torch.device(value)
        if isinstance(value, torch.device) and value.type == "cuda":
            return self.device(value.index)
        return value

    def translating(self, call: Callable) -> Callable:
        """`call`, with CUDA devices among its arguments translated."""

        @functools.wraps(call)
        def translated(*args: Any, **kwargs: Any) -> Any:
            values = {name: self.translate(value) for name, value in kwargs.items()}
            return call(*map(self.translate, args), **values)

        return translated

    def generator(self, original: type) -> type:
        """torch.Generator that takes "cuda" for this platform."""
        platform = self

        class AnyGenerator(type):
            def __instancecheck__(cls, instance: Any) -> bool:
                return isinstance(instance, original)

            def __call__(cls, device: Any = "cpu") -> torch.Generator:
                return original(device=platform.translate(device))

        return AnyGenerator("Generator", (), {"__doc__": original.__doc__})


def detect() -> Platform | None:
    """The platform to add to xDiT on this machine; None where xDiT has its own."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        # xDiT imports these itself, later than this; until then PyTorch does not know the device.
        return None if any(importlib.util.find_spec(name) for name in ("torch_musa", "torch_npu")) else _cpu()
    make = PLATFORMS.get(accelerator.type)
    return make() if make else None


def is_xdits_own() -> bool:
    """Whether the installed xDiT runs on CPU and XPU by itself."""
    return source.found(*_XDITS_OWN) is not None


def _cpu() -> Platform:
    return Platform(
        device_type="cpu",
        backend=lambda: dist.get_default_backend_for_device("cpu"),
        cuda={
            "Event": host_clock.HostEvent,
            "synchronize": _standing_in(_nothing),
            "set_device": _standing_in(_nothing),
            "reset_peak_memory_stats": _standing_in(host_clock.reset_peak_memory),
            "max_memory_allocated": _standing_in(host_clock.peak_memory),
            "max_memory_reserved": _standing_in(host_clock.peak_memory),
            "memory_allocated": _standing_in(host_clock.memory),
            "memory_reserved": _standing_in(host_clock.memory),
        },
    )


_XPU_NAMES = (
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "device_count",
    "empty_cache",
    "get_device_name",
    "get_device_properties",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "reset_peak_memory_stats",
    "set_device",
    "synchronize",
)


_IPEX, _TORCH_CCL = "intel_extension_for_pytorch", "oneccl_bindings_for_pytorch"


def _xpu() -> Platform:
    # Both register themselves with PyTorch, which has to be before a process group is made or a kernel runs.
    for legacy in (_IPEX, _TORCH_CCL):
        _import_if_installed(legacy)
    platform = Platform("xpu", _xpu_backend, {})
    stand_ins = {name: getattr(torch.xpu, name) for name in _XPU_NAMES}
    calls = {
        name: value if isinstance(value, type) else platform.translating(value) for name, value in stand_ins.items()
    }
    return replace(platform, cuda={**calls, "set_device": lambda device: calls["set_device"](_own(device, platform))})


def _own(device: Any, platform: Platform) -> Any:
    """A number by which a script means the device of a local rank, as that device."""
    return platform.device(device) if isinstance(device, int) else device


def _xpu_backend() -> str:
    """xccl is PyTorch's own; ccl is that of torch-ccl, which older stacks bring instead."""
    native = dist.get_default_backend_for_device("xpu")
    if dist.is_backend_available(native):
        return native
    if _import_if_installed(_TORCH_CCL):
        return "ccl"
    raise RuntimeError(
        f"no collectives for XPU: this PyTorch was built without {native!r}, and {_TORCH_CCL}, which would bring "
        "'ccl', is not installed or does not load"
    )


PLATFORMS: Mapping[str, Callable[[], Platform]] = {"xpu": _xpu}
"""Accelerators that the plugin adds to xDiT, by PyTorch's name for the device type."""


def patches(platform: Platform) -> list[Patch]:
    """Rows that make xDiT run on a platform."""
    never = lambda original: lambda *_: False  # noqa: E731
    add = functools.partial(Patch, unless=_XDITS_OWN)
    return [
        # These must be in place before other modules copy them, that is right after xfuser.envs has run.
        add("xfuser.envs", "_is_cuda", "a CUDA build runs on a machine without a GPU", never),
        add("xfuser.envs", "_is_hip", "a ROCm build runs on a machine without a GPU", never),
        add("xfuser.envs", "get_device", "knows no XPU", lambda _: platform.device, ("local_rank",)),
        add("xfuser.envs", "get_device_name", "knows no XPU", lambda _: lambda: platform.device_type),
        add("xfuser.envs", "get_device_version", "raises without an accelerator", lambda _: lambda: None),
        add(
            "xfuser.envs", "get_torch_distributed_backend", "raises without an accelerator", lambda _: platform.backend
        ),
        add(
            "xfuser.envs",
            "PACKAGES_CHECKER.packages_info",
            "sequence parallelism is off without CUDA",
            lambda info: {**info, "has_long_ctx_attn": True},
        ),
        # Asked for the architecture of an AMD GPU when a model is compiled.
        add("xfuser.envs", "PackagesEnvChecker._on_rdna4", "asks torch.cuda for a device", never, ("self",)),
        add("xfuser.envs", "PackagesEnvChecker._on_mi3xx", "asks torch.cuda for a device", never, ("self",)),
        add(
            "xfuser.core.distributed.parallel_state",
            "init_distributed_environment",
            "sets the device of CUDA, MUSA and NPU only",
            lambda original: _select_device_first(original, platform),
        ),
        add("xfuser.model_executor.layers.usp", "PROCESS_GROUP", "None without CUDA", _yunchang_groups),
        # The rest serves scripts, which name CUDA themselves, whatever xDiT knows.
        Patch(
            "diffusers.pipelines.pipeline_utils", "DiffusionPipeline.to", "cuda:N is hard-coded", platform.translating
        ),
        Patch("torch", "Generator", "scripts ask for one on cuda", platform.generator),
        *(
            Patch("torch.cuda", name, _FACADE_WHY, lambda _, stand_in=stand_in: stand_in)
            for name, stand_in in platform.cuda.items()
        ),
    ]


def _select_device_first(original: Callable, platform: Platform) -> Callable:
    @functools.wraps(original)
    def init_distributed_environment(*args: Any, **kwargs: Any) -> None:
        if platform.device_type != "cpu":
            index = launcher.device_index(launcher.local_rank(os.environ), os.environ)
            torch.accelerator.set_device_index(index)
        original(*args, **kwargs)

    return init_distributed_environment


def device_name() -> str:
    """What the driver calls this rank's XPU; empty where there is none. It tells how many tiles a GPU has."""
    return torch.xpu.get_device_name() if torch.xpu.is_available() else ""


def compute_device() -> torch.device:
    """Where this rank's tensors lie."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _yunchang_groups(_: Any) -> Any:
    from yunchang.globals import PROCESS_GROUP

    return PROCESS_GROUP


def _import_if_installed(name: str) -> bool:
    if importlib.util.find_spec(name) is None:
        return False
    try:
        importlib.import_module(name)
    except Exception as error:  # a legacy package that does not fit this PyTorch is as good as absent
        note(f"{name} is installed but does not load, and is left out: {type(error).__name__}: {error}")
        return False
    return True


def _standing_in(call: Callable) -> Callable:
    """`call` as a function of its own: torch.compile's tables want each name of torch.cuda to be another object."""
    return lambda *_, **__: call()


def _nothing() -> None:
    """Stands in for a call that has nothing to do on this platform."""
