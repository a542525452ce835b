"""Stand-ins for the codecs' Triton kernels, which compute nothing and take their time on the device."""

import contextlib
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

from benchmarks.accelerator import op_cost
from benchmarks.accelerator.clock import Clock
from xfuser_cocodiff.engine.codec import kernels


class TritonKernels:
    """Context in which the codecs' Triton kernels are replaced by stand-ins that take their time on the device.

    Args:
        clock: times of the emulated accelerator.
        module: the module of the kernels.
    """

    NAMES = ("encode_kernel", "decode_kernel")

    def __init__(self, clock: Clock, module: ModuleType) -> None:
        self._clock, self._module, self._stack = clock, module, contextlib.ExitStack()

    def __enter__(self) -> None:
        for name in self.NAMES:
            self._stack.enter_context(mock.patch.object(self._module, name, _TritonKernel(self._clock)))
        self._stack.enter_context(mock.patch.object(kernels, "backend_for", lambda device: kernels.TRITON))

    def __exit__(self, *error: object) -> None:
        self._stack.close()


class _TritonKernel:
    """Stand-in for a Triton kernel."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*values: Any, **_: Any) -> None:
            moved = op_cost.moved_bytes(value for value in tree_leaves(values) if isinstance(value, torch.Tensor))
            self._clock.launch(self._clock.accelerator.kernel_seconds(moved))

        return launch
