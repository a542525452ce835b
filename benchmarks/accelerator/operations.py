"""Runs the operations of PyTorch on an emulated accelerator: shapes and times, but no values."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from benchmarks.accelerator import op_cost
from benchmarks.accelerator.clock import Clock
from benchmarks.accelerator.collectives import CollectiveRecorder

HOST_COPY_BYTES_PER_SECOND = 25e9
"""Bytes copied per second between host and device; assumed: 0.8 of PCI Express 4.0 with 16 lanes."""


class Operations(TorchDispatchMode):
    """Context in which operations on the tensors of an emulated accelerator run there.

    Args:
        clock: times of the device.
        device: the device.
    """

    def __init__(self, clock: Clock, device: torch.device) -> None:
        super().__init__()
        self._clock, self._device = clock, device
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._collectives = CollectiveRecorder(clock, self._fake)
        self._depth = 0
        """Number of operations that are being run in terms of others."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and the wrapper for that takes time

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an operation: on the host if no tensor of the device takes part in it, else on the current stream."""
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return self._device
        if op_cost.is_wait(func):
            return self._collectives.wait_tensor(args[0])
        leaves = tree_leaves((args, kwargs))
        creates = any(isinstance(leaf, torch.device) and leaf.type == self._device.type for leaf in leaves)
        pending = [leaf for leaf in leaves if isinstance(leaf, AsyncCollectiveTensor)]
        if not creates and not pending and not any(isinstance(leaf, FakeTensor) for leaf in leaves):
            return func(*args, **{**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs)
        if func.namespace == "c10d":
            return self._collectives.run(func, args)
        if op_cost.is_composite(func):
            return self._run_composite(func, args, kwargs)
        if pending:
            args, kwargs = tree_map_only(AsyncCollectiveTensor, self._collectives.wait_tensor, (args, kwargs))
        if func.namespace == "_c10d_functional":
            return self._collectives.run_functional(func, args)
        copy = self._copied(func, args, kwargs)
        return self._run_kernel(func, args, kwargs) if copy is NotImplemented else copy

    def _run_composite(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an operation that consists of others."""
        launches = len(self._clock.program.kernels)
        self._depth += 1
        try:
            with self:
                result = op_cost.run_composite(func, args, kwargs)
        finally:
            self._depth -= 1
        if launches == len(self._clock.program.kernels) and not self._depth:
            self._clock.spend_call_time()
        return result

    def _run_kernel(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an operation with a kernel of its own on the current stream."""
        with self._fake:
            result = func(*args, **kwargs)
        if not op_cost.is_free(func):
            self._clock.launch(op_cost.kernel_seconds(self._clock.accelerator, func, args, kwargs, result))
        elif not self._depth:
            self._clock.spend_call_time()
        return result

    def _copied(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the result of a copy between host and device, and NotImplemented for all other operations."""
        name, is_asynchronous = op_cost.name_of(func), bool(kwargs.get("non_blocking"))
        if name == "copy_" and not (isinstance(args[0], FakeTensor) and isinstance(args[1], FakeTensor)):
            self._copy(args[0].nbytes, is_asynchronous or bool(args[2:] and args[2]))
            return args[0] if isinstance(args[0], FakeTensor) else args[0].zero_()  # as all values that are read
        if name == "_to_copy" and not isinstance(args[0], FakeTensor):
            with self._fake:
                copy = torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=self._device)
        elif name == "_to_copy" and kwargs.get("device") == torch.device("cpu"):
            copy = torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        else:
            return NotImplemented
        self._copy(copy.nbytes, is_asynchronous)
        return copy

    def _copy(self, num_bytes: int, is_asynchronous: bool) -> None:
        """Copy bytes between host and device; unless it is asynchronous, the host waits for the stream."""
        self._clock.launch(max(num_bytes / HOST_COPY_BYTES_PER_SECOND, self._clock.accelerator.shortest_kernel_seconds))
        if not is_asynchronous:
            self._clock.streams[-1].synchronize()
