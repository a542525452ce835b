"""An emulated accelerator: PyTorch code runs on it without computing anything, and what it does is recorded.

It is a PyTorch device of its own. Its tensors are fake tensors: they have shapes and no values. An operation adds the
duration of its kernel to the current stream, and a launch to the time of the host. A collective is recorded with the
instant at which its stream reaches it, and :func:`prediction.predict` moves its bytes.
Streams, events and waits order everything as on CUDA, so code that supports accelerators takes the same paths.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

from benchmarks.accelerator import fused_operations, host_functions, op_cost
from benchmarks.accelerator.clock import Clock
from benchmarks.accelerator.device_type import DEVICE_TYPE, register
from benchmarks.accelerator.operations import Operations
from xfuser_cocodiff.engine.codec import kernels, triton_kernels
from xfuser_cocodiff.engine.topology import devices
from xfuser_cocodiff.tools.accelerator.accelerators import Accelerator

_CAPABILITIES = devices.Capabilities(uses_triton=True, has_stream_priorities=True)


class EmulatedAccelerator(Clock):
    """Context in which tensors can be created on the emulated accelerator of this rank.

    Args:
        accelerator: speed of the device.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__(accelerator)
        self.device = register()
        self._operations = Operations(self, self.device)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "EmulatedAccelerator":
        # PyTorch builds this set once. Built now, it contains the real torch.tensor, which torch.device must recognize.
        torch.utils._device._device_constructors()
        replaced: list[tuple[Any, str, Callable]] = [
            (torch, "Stream", lambda *_, **__: self.new_stream()),
            (torch.accelerator, "current_stream", lambda *_: self.streams[-1]),
            *host_functions.replacements(DEVICE_TYPE),
            *fused_operations.replacements(DEVICE_TYPE),
        ]
        with contextlib.ExitStack() as stack:
            for owner, name, replacement in replaced:
                stack.enter_context(mock.patch.object(owner, name, replacement))
            stack.enter_context(mock.patch.dict(devices._CAPABILITIES, {DEVICE_TYPE: _CAPABILITIES}))
            devices.capabilities.cache_clear()
            stack.callback(devices.capabilities.cache_clear)
            for name in ("encode_kernel", "decode_kernel"):
                stack.enter_context(mock.patch.object(triton_kernels, name, _TritonKernel(self)))
            stack.enter_context(mock.patch.object(kernels, "backend_for", lambda device: kernels.TRITON))
            stack.enter_context(self._operations)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def run_kernel(
        self, read: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Launch a kernel that reads some tensors and writes new ones, each once; return the new ones.

        Args:
            read: on this device.
            shapes: of the new tensors.
            dtype: of the new tensors.
        """
        written = [torch.empty(*shape, dtype=dtype, device=self.device) for shape in shapes]
        self.launch(self.accelerator.kernel_seconds(op_cost.moved_bytes([*read, *written])))
        return written


class _TritonKernel:
    """Stand-in for a Triton kernel of the codecs, which takes its time on the device."""

    def __init__(self, accelerator: EmulatedAccelerator) -> None:
        self._accelerator = accelerator

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*values: Any, **_: Any) -> None:
            tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
            self._accelerator.run_kernel(tensors, [], torch.uint8)

        return launch
