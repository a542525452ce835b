"""All facts of scripts/one_gpu.sh without a GPU: torchrun -m tests.benchmarks.one_gpu.dry_run FOLDER FACT

Facts run on the CPU, Triton's kernels by its interpreter. Functions of torch.cuda are replaced by stand-ins, which take
the arguments of the real ones. Tools of the CUDA toolkit run the program that they are given and print what they would
print.
"""

import contextlib
import importlib
import inspect
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.one_gpu import kernel_facts
from benchmarks.one_gpu.__main__ import measure_and_exit
from benchmarks.one_gpu.setting import Setting

IMPORTED_FIRST = "xfuser.core.distributed.runtime_state", "xfuser.model_executor.models.transformers.transformer_flux"
"""Modules that import libraries whose annotations need the real torch.cuda."""
OUTPUTS = {
    "memcheck": "========= ERROR SUMMARY: 0 errors",
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
    "ncu": """==PROF== Connected to process 1
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","1","encode_kernel","launch__registers_per_thread","register/thread","64"
""",
}
"""Output of the tools of the CUDA toolkit."""
TOY_TENSORS = ["16", "1"]
"""Tokens and heads of the three tensors."""


class Event:
    """torch.cuda.Event of a device that has always ended."""

    def __init__(self, **_: bool) -> None:
        pass

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return 1.0


class Graph:
    """torch.cuda.CUDAGraph whose calls have run while it was captured."""

    def replay(self) -> None:
        pass


STAND_INS: dict[str, Callable] = {
    "CUDAGraph": Graph,
    "Event": Event,
    "Stream": contextlib.nullcontext,
    "_sleep": lambda cycles: None,
    "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=2**18),
    "graph": lambda cuda_graph, stream: stream,
    "set_sync_debug_mode": lambda debug_mode: None,
    "stream": lambda stream: stream,
    "synchronize": lambda: None,
}
"""Functions of torch.cuda that facts call."""


def like_the_real_one(name: str, stand_in: Callable) -> Callable:
    """Return a stand-in that takes only the arguments that a function of torch.cuda takes."""
    real = getattr(torch.cuda, name)
    signature, owner = inspect.signature(real.__new__ if name == "Event" else real), [real] * (name == "Event")

    def checked(*args: Any, **kwargs: Any) -> Any:
        signature.bind(*owner, *args, **kwargs)
        return stand_in(*args, **kwargs)

    return checked


def run_module(command: Sequence[str], **_: Any) -> SimpleNamespace:
    """Run the Python module of a command line in this process, and return what a tool around it would print."""
    start = command.index(sys.executable)
    [_, module, *arguments] = command[start + 1 :]
    with mock.patch.object(sys, "argv", [module, *(TOY_TENSORS if start else arguments)]):
        try:
            runpy.run_module(module, run_name="__main__")
        except SystemExit as ended:
            return SimpleNamespace(returncode=ended.code)
    [output] = [text for tool, text in OUTPUTS.items() if tool in command[:start]]
    return SimpleNamespace(stdout=output)


@contextlib.contextmanager
def without_gpu(name: str, folder: Path) -> Iterator[Setting]:
    """Return a context in which a fact can be measured without a GPU, and its setting."""
    for module in IMPORTED_FIRST:
        importlib.import_module(module)
    with contextlib.ExitStack() as stack:
        tools = SimpleNamespace(run=run_module, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)
        stack.enter_context(mock.patch.object(kernel_facts, "subprocess", tools))
        for function, stand_in in STAND_INS.items():
            stack.enter_context(mock.patch.object(torch.cuda, function, like_the_real_one(function, stand_in)))
        if name == "layers" and dist.is_initialized():  # by a test; xDiT then starts on one of many ranks
            dist.destroy_process_group()
        yield Setting(folder, torch.device("cpu"), is_dry_run=True)


if __name__ == "__main__":
    os.environ.update(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    with without_gpu(sys.argv[2], Path(sys.argv[1])) as setting:
        measure_and_exit(sys.argv[2], setting)
