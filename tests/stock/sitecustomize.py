"""Stock xDiT on a CPU without the plugin: the minimal patches that it needs there, independent of the plugin's.

An interpreter loads this module at its start if it is in PYTHONPATH. It is the baseline of tests that compare xDiT with
and without the installed plugin.
"""

import importlib.machinery
import sys
import time


class _HostEvent:
    def __init__(self, **_):
        self.time = None

    def record(self):
        self.time = time.time()

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return (other.time - self.time) * 1000


def _patch_envs(envs):
    envs.get_device_version = lambda: None
    envs.get_torch_distributed_backend = lambda: "gloo"
    envs.PACKAGES_CHECKER.packages_info["has_long_ctx_attn"] = True
    import torch

    generator = torch.Generator
    torch.Generator = type("Generator", (), {"__new__": lambda cls, device="cpu": generator()})
    torch.cuda.Event = _HostEvent
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.max_memory_allocated = lambda *_, **__: 0
    torch.cuda.reset_peak_memory_stats = lambda *_, **__: None


def _patch_usp(usp):
    from yunchang.globals import PROCESS_GROUP

    usp.PROCESS_GROUP = PROCESS_GROUP


def _patch_kernels(kernels):
    # Sana uses a name that yunchang has renamed.
    kernels.AttnType.TORCH = kernels.AttnType.TORCH_MATH


def _patch_ring(ring):
    if not hasattr(ring, "update_npu_out"):  # missing in yunchang 0.6.4; used on NPUs only
        ring.update_npu_out = None


def _patch_pipelines(module):
    to = module.DiffusionPipeline.to

    def to_host(self, *args, **kwargs):
        return to(self, *("cpu" if str(value).startswith("cuda") else value for value in args), **kwargs)

    module.DiffusionPipeline.to = to_host


def _run_as_with_cuda(run, module):
    import torch
    import yunchang.kernels  # before CUDA seems available  # noqa: F401

    is_available, torch.cuda.is_available = torch.cuda.is_available, lambda: True
    try:
        run(module)
    finally:
        torch.cuda.is_available = is_available


_PATCHES = {
    "xfuser.envs": _patch_envs,
    "xfuser.model_executor.layers.usp": _patch_usp,
    "diffusers.pipelines.pipeline_utils": _patch_pipelines,
    "yunchang.kernels": _patch_kernels,
    "yunchang.ring.utils": _patch_ring,
}
_LONG_CONTEXT = "xfuser.core.long_ctx_attention."
"""Modules that import yunchang with CUDA only."""


class _Finder:
    def find_spec(self, name, path=None, target=None):
        if name not in _PATCHES and not name.startswith(_LONG_CONTEXT):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        run = spec.loader.exec_module

        def exec_module(module):
            if name in _PATCHES:
                run(module)
                _PATCHES[name](module)
            else:
                _run_as_with_cuda(run, module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
