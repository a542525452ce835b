"""Platforms that xDiT does not know: Intel's XPU, and a device that several ranks share.

xDiT itself supports CUDA, ROCm, MUSA, NPU and MPS with one device for each rank.
"""

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from xfuser_cocodiff.engine.topology import launcher
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.patching import host
from xfuser_cocodiff.xdit.patching.log import info_once
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.patching.symbol_lookup import without
from xfuser_cocodiff.xdit.platforms import attention_kernels, local_device

_FACADE_WHY = "xDiT calls torch.cuda directly"
WITHOUT_SUPPORT = without("xfuser.envs", "supports_usp")
"""Condition of patches: xDiT does not run on CPU and XPU by itself. The series in patches/ adds the symbol."""


@dataclass(frozen=True)
class Platform:
    """A device type for xDiT, with its replacements of torch.cuda."""

    device_type: str
    backend: Callable[[], str]
    """Returns the name of the torch.distributed backend."""
    cuda: Mapping[str, Any]
    """Replacements in torch.cuda, by name."""
    devices: int | None = None
    """Number of devices that all ranks of a node share; None where each rank has its own."""

    def device(self, index: int | None = None) -> torch.device:
        """Return the device of a local rank."""
        return torch.device(self.device_type, None if index is None else self.index(index))

    def index(self, local_rank: int) -> int:
        """Return the index of a local rank's device."""
        return local_rank % self.devices if self.devices else local_device.device_index(local_rank, os.environ)

    def translate(self, value: Any) -> Any:
        """Return this platform's device for a CUDA device, its name or a local rank; any other value unchanged."""
        if isinstance(value, str) and value.partition(":")[0] == "cuda":
            value = torch.device(value)
        if isinstance(value, torch.device) and value.type == "cuda":
            return self.device(value.index)
        return self.device(value) if type(value) is int else value  # a bool is an int too

    def translating(self, call: Callable) -> Callable:
        """Return a function that translates CUDA devices and local ranks among its arguments."""

        @functools.wraps(call)
        def translated(*args: Any, **kwargs: Any) -> Any:
            values = {name: self.translate(value) for name, value in kwargs.items()}
            return call(*map(self.translate, args), **values)

        return translated

    def generator(self, original: type) -> type:
        """Return a torch.Generator that translates its device."""
        platform = self

        class AnyGenerator(type):
            def __instancecheck__(cls, instance: Any) -> bool:
                return isinstance(instance, original)

            def __call__(cls, device: Any = "cpu") -> torch.Generator:
                return original(device=platform.translate(device))

        return AnyGenerator("Generator", (), {"__doc__": original.__doc__})


def has_accelerator() -> bool:
    """Return whether this machine has an accelerator, as far as can be told before xDiT is imported."""
    # xDiT imports these packages later; until then PyTorch does not know their devices.
    is_possible = any(importlib.util.find_spec(name) for name in ("torch_musa", "torch_npu"))
    return is_possible or torch.accelerator.current_accelerator(check_available=True) is not None


def detect() -> Platform | None:
    """Return the platform to add to xDiT on this machine; None where xDiT supports it."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return None
    make = PLATFORMS.get(accelerator.type)
    if (make or accelerator.type == "cuda") and local_device.shares_device(
        os.environ, sys.argv, torch.accelerator.device_count()
    ):
        return _shared(accelerator.type)
    return make() if make else None


_FACADE = (
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


def _xpu() -> Platform:
    return _with_facade(Platform("xpu", _xpu_backend, {}))


def _shared(device_type: str) -> Platform:
    """Return the platform of devices that ranks share, with gloo: no other backend supports that."""
    platform = Platform(device_type, lambda: dist.Backend.GLOO, {}, torch.accelerator.device_count())
    info_once(
        f"the ranks of this node share {platform.devices} {device_type} device(s): communication uses gloo and host "
        "memory"
    )
    return _with_facade(platform)


def _with_facade(platform: Platform) -> Platform:
    module = getattr(torch, platform.device_type)
    calls = {name: getattr(module, name) for name in _FACADE}
    facade = {name: call if isinstance(call, type) else platform.translating(call) for name, call in calls.items()}
    return replace(platform, cuda=facade)


def _xpu_backend() -> str:
    """Return "xccl", PyTorch's backend."""
    backend = dist.get_default_backend_for_device("xpu")
    if not dist.is_backend_available(backend):
        raise RuntimeError(f"no collectives for XPU: this PyTorch was built without {backend!r}; install one with it")
    return backend


PLATFORMS: Mapping[str, Callable[[], Platform]] = {"xpu": _xpu}
"""Accelerators that the plugin adds to xDiT, by PyTorch's device type."""


def _always(replacement: Any) -> Callable[[Any], Any]:
    return lambda original: replacement


def patches(platform: Platform) -> list[Patch]:
    """Return the patches with which xDiT runs on a platform."""
    if platform.device_type == "cuda":
        return [*_sharing(platform), *for_scripts(platform)]
    return [
        *for_environment(platform),
        *_for_device(platform),
        *for_groups(),
        *for_scripts(platform),
        *attention_kernels.patches(attention_kernels.xpu_kernel()),
    ]


_add = functools.partial(Patch, condition=WITHOUT_SUPPORT)


def never(original: Callable) -> Callable:
    """Return a function that returns False."""
    return lambda *_: False


def for_environment(platform: Platform) -> list[Patch]:
    """Return the patches of xfuser.envs: right after its import, before other modules copy its symbols."""
    return [
        _add("xfuser.envs", "get_device", "knows no XPU", lambda _: platform.device, ("local_rank",)),
        _add("xfuser.envs", "get_device_name", "knows no XPU", lambda _: lambda: platform.device_type),
        _add("xfuser.envs", "get_device_version", "raises without an accelerator", lambda _: lambda: None),
        _add(
            "xfuser.envs", "get_torch_distributed_backend", "raises without an accelerator", lambda _: platform.backend
        ),
        _add(
            "xfuser.envs",
            "PACKAGES_CHECKER.packages_info",
            "sequence parallelism is off without CUDA",
            lambda info: {**info, "has_long_ctx_attn": True},
        ),
        # Called when a model is compiled, for the architecture of an AMD GPU.
        _add("xfuser.envs", "PackagesEnvChecker._on_rdna4", "asks torch.cuda for a device", never, ("self",)),
    ]


def _for_device(platform: Platform) -> list[Patch]:
    """Return the patch that selects a rank's device."""
    return [
        _add(
            "xfuser.core.distributed.parallel_state",
            "init_distributed_environment",
            "sets the device of CUDA, MUSA and NPU only",
            lambda original: _select_device_first(original, platform),
        ),
    ]


def for_groups() -> list[Patch]:
    """Return the patches of process groups."""
    return [
        _add("xfuser.model_executor.layers.usp", "PROCESS_GROUP", "None without CUDA", lambda _: host.process_groups()),
        *(
            _add(f"xfuser.core.{module}", "PROCESS_GROUP", "None without CUDA", lambda _: host.process_groups())
            for module in ("distributed.fp8_comms", "sparge_attention.head_balance")
        ),
    ]


def for_scripts(platform: Platform) -> list[Patch]:
    """Return the patches of diffusers and PyTorch for scripts that name CUDA, also where xDiT supports the device."""
    return [
        Patch(
            "diffusers.pipelines.pipeline_utils", "DiffusionPipeline.to", "cuda:N is hard-coded", platform.translating
        ),
        Patch("torch", "Generator", "scripts ask for one on cuda", platform.generator),
        *(Patch("torch.cuda", name, _FACADE_WHY, _always(replacement)) for name, replacement in platform.cuda.items()),
    ]


def _sharing(platform: Platform) -> list[Patch]:
    """Return the patches with which several ranks share a device that xDiT supports."""
    return [
        Patch("xfuser.envs", "get_device", "gives each rank its own", lambda _: platform.device, ("local_rank",)),
        Patch("xfuser.envs", "get_torch_distributed_backend", "NCCL refuses it", lambda _: platform.backend),
        Patch("xfuser.core.distributed.parallel_state", "set_device", "gives each rank its own", platform.translating),
    ]


def _select_device_first(original: Callable, platform: Platform) -> Callable:
    @functools.wraps(original)
    def init_distributed_environment(*args: Any, **kwargs: Any) -> None:
        torch.accelerator.set_device_index(platform.index(local_device.local_rank(os.environ)))
        original(*args, **kwargs)

    return init_distributed_environment


def device_name() -> str:
    """Return the driver's name of this rank's XPU, which tells the number of tiles; empty where there is no XPU."""
    return torch.xpu.get_device_name() if torch.xpu.is_available() else ""


def detect_topology(degree: int) -> Topology:
    """Return the topology of groups of `degree` ranks that launcher and device show on this rank; ranks of different
    nodes may detect different ones."""
    return launcher.detect(degree, os.environ, device_name())


def compute_device() -> torch.device:
    """Return the device type of this rank's tensors."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def is_captured() -> bool:
    """Return whether a graph is being captured, which would repeat the work of this one step.

    Called several times a layer: asking for the device would cost more host time than both of these calls.
    """
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
