"""Platforms that xDiT does not know: the CPU, Intel's XPU, and a device that several ranks share.

CUDA, ROCm, MUSA, NPU and MPS are left to xDiT where each rank has a device of its own.
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

from xfuser_cocodiff.engine.topology import devices as devices
from xfuser_cocodiff.engine.topology import launcher
from xfuser_cocodiff.xdit.patching import symbol_lookup
from xfuser_cocodiff.xdit.patching.log import info_once, warn_once
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.platforms import host_clock, long_context, pipefusion, ray_cluster

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
    devices: int | None = None
    """How many there are for all ranks of a node, where they share them."""

    def device(self, index: int | None = None) -> torch.device:
        """The device of a local rank; the CPU has one for all."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(self.device_type, None if index is None else self.index(index))

    def index(self, local_rank: int) -> int:
        """The device of a local rank, by number."""
        return local_rank % self.devices if self.devices else launcher.device_index(local_rank, os.environ)

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

    def by_rank(self, call: Callable) -> Callable:
        """The same of `call` whose numbers, too, stand for the devices of local ranks."""
        translated = self.translating(call)

        def own(value: Any) -> Any:
            return self.device(value) if isinstance(value, int) else value

        @functools.wraps(call)
        def called(*args: Any, **kwargs: Any) -> Any:
            return translated(*map(own, args), **{name: own(value) for name, value in kwargs.items()})

        return called

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
    if (make or accelerator.type == "cuda") and launcher.shares_device(
        os.environ, sys.argv, torch.accelerator.device_count()
    ):
        return _shared(accelerator.type)
    return make() if make else None


def has_native_support() -> bool:
    """Whether the installed xDiT runs on CPU and XPU by itself."""
    return symbol_lookup.find_symbol(*_XDITS_OWN) is not None


def _cpu() -> Platform:
    return Platform(
        device_type="cpu",
        backend=lambda: dist.get_default_backend_for_device("cpu"),
        cuda={
            "Event": host_clock.HostEvent,
            "current_device": _standing_in(lambda: torch.device("cpu")),  # callers make tensors on it
            "synchronize": _standing_in(_nothing),
            "set_device": _standing_in(_nothing),
            "reset_peak_memory_stats": _standing_in(host_clock.reset_peak_memory),
            "max_memory_allocated": _standing_in(host_clock.peak_memory),
            "max_memory_reserved": _standing_in(host_clock.peak_memory),
            "memory_allocated": _standing_in(host_clock.memory),
            "memory_reserved": _standing_in(host_clock.memory),
        },
    )


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


_IPEX, _TORCH_CCL = "intel_extension_for_pytorch", "oneccl_bindings_for_pytorch"


def _xpu() -> Platform:
    # Both register themselves with PyTorch, which has to be before a process group is made or a kernel runs.
    for legacy in (_IPEX, _TORCH_CCL):
        _import_if_installed(legacy)
    return _with_facade(Platform("xpu", _xpu_backend, {}))


def _shared(device_type: str) -> Platform:
    """Gloo is the one backend that lets several ranks have the same device."""
    platform = Platform(device_type, lambda: dist.Backend.GLOO, {}, torch.accelerator.device_count())
    info_once(
        f"the ranks of this node share {platform.devices} {device_type} device(s): communication uses gloo and host "
        "memory"
    )
    return _with_facade(platform)


def _with_facade(platform: Platform) -> Platform:
    module = getattr(torch, platform.device_type)
    calls = {name: getattr(module, name) for name in _FACADE}
    facade = {name: call if isinstance(call, type) else platform.by_rank(call) for name, call in calls.items()}
    return replace(platform, cuda=facade)


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


def _always(stand_in: Any) -> Callable[[Any], Any]:
    return lambda original: stand_in


def patches(platform: Platform) -> list[Patch]:
    """Rows that make xDiT run on a platform."""
    # These serve scripts, which name CUDA themselves, whatever xDiT knows.
    naming = [
        Patch(
            "diffusers.pipelines.pipeline_utils", "DiffusionPipeline.to", "cuda:N is hard-coded", platform.translating
        ),
        Patch("torch", "Generator", "scripts ask for one on cuda", platform.generator),
        *(Patch("torch.cuda", name, _FACADE_WHY, _always(stand_in)) for name, stand_in in platform.cuda.items()),
    ]
    if platform.device_type == "cuda":
        return [*_sharing(platform), *naming]
    if platform.device_type == "cpu":
        naming += ray_cluster.patches()
    never = lambda original: lambda *_: False  # noqa: E731
    add = functools.partial(Patch, unless_present=_XDITS_OWN)
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
        *(
            add(f"xfuser.core.{module}", "PROCESS_GROUP", "None without CUDA", _yunchang_groups)
            for module in ("distributed.fp8_comms", "sparge_attention.head_balance")
        ),
        *long_context.patches(),
        *pipefusion.patches(),
        *naming,
    ]


def _sharing(platform: Platform) -> list[Patch]:
    """Rows that let several ranks have one device of a kind that xDiT knows."""
    return [
        Patch("xfuser.envs", "get_device", "gives each rank its own", lambda _: platform.device, ("local_rank",)),
        Patch("xfuser.envs", "get_torch_distributed_backend", "NCCL refuses it", lambda _: platform.backend),
        Patch("xfuser.core.distributed.parallel_state", "set_device", "gives each rank its own", platform.by_rank),
    ]


def _select_device_first(original: Callable, platform: Platform) -> Callable:
    @functools.wraps(original)
    def init_distributed_environment(*args: Any, **kwargs: Any) -> None:
        if platform.device_type != "cpu":
            torch.accelerator.set_device_index(platform.index(launcher.local_rank(os.environ)))
        original(*args, **kwargs)

    return init_distributed_environment


def device_name() -> str:
    """What the driver calls this rank's XPU; empty where there is none. It tells how many tiles a GPU has."""
    return torch.xpu.get_device_name() if torch.xpu.is_available() else ""


def compute_device() -> torch.device:
    """Where this rank's tensors lie."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def is_captured() -> bool:
    """Whether what is called now becomes part of a graph, which would repeat what is done at this one step."""
    return devices.is_captured(compute_device())


def _yunchang_groups(_: Any) -> Any:
    from yunchang.globals import PROCESS_GROUP

    return PROCESS_GROUP


def _import_if_installed(name: str) -> bool:
    if importlib.util.find_spec(name) is None:
        return False
    try:
        importlib.import_module(name)
    except Exception as error:  # a legacy package that does not fit this PyTorch is as good as absent
        warn_once(f"{name} is ignored, since its import fails: {type(error).__name__}: {error}; reinstall or remove it")
        return False
    return True


def _standing_in(call: Callable) -> Callable:
    """`call` as a function of its own: torch.compile's tables want each name of torch.cuda to be another object."""
    return lambda *_, **__: call()


def _nothing() -> None:
    """Stands in for a call that has nothing to do on this platform."""
