"""An emulated accelerator: PyTorch code runs on it without computing anything, and what it does is recorded.

It is a PyTorch device of its own. Its tensors are fake tensors: they have shapes and no values. An operation adds the
duration of its kernel to the current stream, and a launch to the time of the host. A collective is recorded with the
instant at which its stream reaches it, and :class:`transport.Transport` moves its bytes when the recorded step runs.
Streams, events and waits order everything as on CUDA, so code that supports accelerators takes the same paths.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Hashable, Sequence
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from xfuser_cocodiff.engine import kernels
from xfuser_cocodiff.engine.topology import devices
from xfuser_cocodiff.lab.accelerator import fused_operations, op_cost
from xfuser_cocodiff.lab.accelerator.accelerators import HOST_COPY_BYTES_PER_SECOND, Accelerator
from xfuser_cocodiff.lab.accelerator.call_cache import CallCache, UnknownArgumentError, describe
from xfuser_cocodiff.lab.accelerator.program import GroupPattern, Program, RecordedCollective
from xfuser_cocodiff.lab.accelerator.provenance import Provenance
from xfuser_cocodiff.lab.accelerator.streams import Event, Stream
from xfuser_cocodiff.lab.accelerator.time_line import Instant

DEVICE_TYPE = BACKEND = "emulated"
"""PyTorch's names of the device type, and of its backend of torch.distributed."""
_CAPABILITIES = devices.Capabilities(uses_triton=True, has_stream_priorities=True)


class _DeviceModule(backend_registration._DummyBackendModule):
    """The module torch.emulated, which PyTorch and the plugin ask about the device."""

    def get_device_name(self, device: object = None) -> str:
        """Return the name of the device."""
        return DEVICE_TYPE


@functools.cache
def register() -> torch.device:
    """Register device type and backend in this process, permanently, and return the device.

    Collectives of the backend return at once, without communication: one process records for all ranks.

    Raises:
        RuntimeError: this PyTorch has no devices that are written in Python.
    """
    make_device = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)
    if make_device is None:
        raise RuntimeError(f"emulated accelerators need PyTorch 2.10 or later, not {torch.__version__}")
    make_device(DEVICE_TYPE, backend_module=_DeviceModule())
    dist.Backend.register_backend(BACKEND, _new_group, extended_api=True, devices=["cpu", DEVICE_TYPE])
    return torch.device(DEVICE_TYPE, 0)


def _new_group(options: Any, _: object) -> Any:
    return FakeProcessGroup._create_internal(options.group_rank, options.group_size, FakeProcessGroup.Options())


class EmulatedAccelerator:
    """Context in which tensors can be created on the emulated accelerator of this rank.

    Args:
        accelerator: speed of the device.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.device, self.accelerator = register(), accelerator
        self.host_time = Instant()
        """What the host has reached; it is ahead of the device unless it waits."""
        self.streams = [Stream(self)]
        """The current stream, last, and those that it has replaced."""
        self.program = Program()
        """What has been recorded since the step began."""
        self.num_steps = 0
        """Number of steps begun."""
        self._made: list[Stream] = []
        self._last: dict[GroupPattern, RecordedCollective] = {}
        """The last collective of each group in this step."""
        self._provenance = Provenance()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._calls = CallCache(self._fake, self.device, self._provenance)
        self._depth = 0
        """Number of operations that are being run in terms of others."""
        self._kernels: list[float] = []
        """Durations of the kernels of the current operation."""
        self._num_unrepeatable = 0
        """Number of operations so far that did more than kernels."""
        self._operations = _Operations(self)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "EmulatedAccelerator":
        Event.host = self
        replaced: list[tuple[Any, str, Callable]] = [
            (torch, "Stream", self._new_stream),
            (torch, "Event", Event),
            (torch.accelerator, "current_stream", lambda *_: self.streams[-1]),
            (torch.accelerator, "synchronize", lambda *_: self.synchronize()),
            (torch.Tensor, "record_stream", lambda *_: None),
            (torch.Tensor, "data_ptr", _address_of(torch.Tensor.data_ptr)),
            (torch, "tensor", _copied_to_device(torch.tensor)),
            (torch.Tensor, "new_tensor", _new_tensor),
            *fused_operations.replacements(DEVICE_TYPE),
        ]
        for owner, name, replacement in replaced:
            self._stack.enter_context(mock.patch.object(owner, name, replacement))
        self._stack.enter_context(mock.patch.dict(devices._CAPABILITIES, {DEVICE_TYPE: _CAPABILITIES}))
        devices.capabilities.cache_clear()
        self._stack.callback(devices.capabilities.cache_clear)
        self._stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # the plugin compares pointers
        self._stack.enter_context(self._operations)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def begin_step(self) -> None:
        """Begin to record a step, on an idle host and device."""
        self.program, self.host_time = Program(), Instant()
        self.num_steps += 1
        self._last.clear()
        for stream in (*self.streams, *self._made):
            stream.tail = Instant()

    def end_step(self) -> Program:
        """Return everything since the step began. The step ends when host and device have nothing left to do."""
        self.program.end = self.host_time.latest(self._device_end())
        return self.program

    def synchronize(self) -> None:
        """Let the host wait until the device has ended everything queued so far, in all streams and groups."""
        self.host_time = self.host_time.latest(self._device_end())

    def _device_end(self) -> Instant:
        end = Instant()
        for collective in self._last.values():
            end = end.after_collective(collective)
        for stream in (*self.streams, *self._made):
            end = end.latest(stream.tail)
        return end

    def mark(self, name: str) -> None:
        """Record the end of everything in the current stream so far under a name."""
        self.program.marks[name] = self.streams[-1].tail.latest(self.host_time)
        self.program.counts[name] = self.program.counts_so_far()

    def launch(self, seconds: float) -> None:
        """Launch a kernel on the current stream, given its duration."""
        self.spend_host_time(self.accelerator.launch_seconds)
        self.streams[-1].launch(seconds)
        self._kernels.append(seconds)
        self.program.kernel_seconds += seconds
        self.program.launches += 1

    def spend_host_time(self, seconds: float) -> None:
        """Let the host be busy for some time."""
        self.host_time = self.host_time.after(seconds)
        self.program.host_seconds += seconds

    def spend_call_time(self) -> None:
        """Let the host be busy with a call that launches no kernel."""
        self.spend_host_time(self.accelerator.call_seconds)

    def run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an operation: on the host if no tensor of the device takes part in it, else on the current stream."""
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return self.device
        try:
            key, tensors = describe(func, args, kwargs)
            effect = self._calls.get(key)
        except UnknownArgumentError:
            return self._run_unknown(func, args, kwargs)
        if effect is None:
            return self._run_unknown(func, args, kwargs, key, tensors)
        for seconds in effect.kernels:
            self.launch(seconds)
        if not effect.kernels and not self._depth:
            self.spend_call_time()
        return self._calls.repeat(key, effect, tensors)

    def _run_unknown(
        self, func: Any, args: tuple, kwargs: dict[str, Any], key: Hashable = None, tensors: Sequence = ()
    ) -> Any:
        """Run an operation whose effect is not known.

        Args:
            func: the operation.
            args: its positional arguments.
            kwargs: its keyword arguments.
            key: key of the call, if its effect can be kept.
            tensors: its tensors.
        """
        if op_cost.is_wait(func):
            return self._wait_tensor(args[0])
        leaves = tree_leaves((args, kwargs))
        creates = any(isinstance(leaf, torch.device) and leaf.type == DEVICE_TYPE for leaf in leaves)
        pending = [leaf for leaf in leaves if isinstance(leaf, AsyncCollectiveTensor)]
        if not creates and not pending and not any(isinstance(leaf, FakeTensor) for leaf in leaves):
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return self._collective(func, args)
        if op_cost.is_composite(func):
            return self._run_composite(func, args, kwargs, key, tensors)
        if pending:
            return self._run_pending(func, args, kwargs)
        if func.namespace == "_c10d_functional":
            return self._functional_collective(func, args)
        answer = self._answer(func, args, kwargs)
        return self._run_kernel(func, args, kwargs, key, tensors) if answer is NotImplemented else answer

    def _run_composite(
        self, func: Any, args: tuple, kwargs: dict[str, Any], key: Hashable, tensors: Sequence[torch.Tensor]
    ) -> Any:
        """Run an operation that consists of others. Its sources are its own where it only copies or joins."""
        outer, self._kernels, num_unrepeatable = self._kernels, [], self._num_unrepeatable
        self._depth += 1
        try:
            with self._operations:
                result = func.decompose(*args, **kwargs)
        finally:
            self._depth -= 1
            kernels, self._kernels = self._kernels, outer
            outer.extend(kernels)
        if not kernels and not self._depth:
            self.spend_call_time()
        if key is not None and num_unrepeatable == self._num_unrepeatable and not func._schema.is_mutable:
            self._calls.learn_composite(key, tensors, result, kernels)
        return result

    def _run_kernel(
        self, func: Any, args: tuple, kwargs: dict[str, Any], key: Hashable, tensors: Sequence[torch.Tensor]
    ) -> Any:
        """Run an operation with a kernel of its own on the current stream."""
        with self._fake:
            result = func(*args, **kwargs)
        kernels = []
        if not op_cost.is_free(func):
            kernels.append(op_cost.kernel_seconds(self.accelerator, func, args, kwargs, result))
            self.launch(kernels[0])
        elif not self._depth:
            self.spend_call_time()
        if key is None:
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self._calls.learn_kernel(func, key, tensors, result, kernels)
        return result

    def _run_pending(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run an operation on results of collectives: a view is pending too, anything else waits for them first."""
        if not func.is_view:
            return self.run(func, *tree_map_only(AsyncCollectiveTensor, self._wait_tensor, (args, kwargs)))
        source = args[0].elem
        views = self.run(func, *tree_map_only(AsyncCollectiveTensor, lambda tensor: tensor.elem, (args, kwargs)))
        return tree_map_only(torch.Tensor, lambda view: _pending_view(view, source), views)

    def _answer(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the result of an operation that needs values, or copies between host and device; else
        NotImplemented."""
        name = op_cost.name_of(func)
        if name in ("_local_scalar_dense", "item"):
            self._copy(args[0].element_size(), is_asynchronous=False)
            return False if args[0].dtype == torch.bool else 0.0 if args[0].is_floating_point() else 0
        if name == "equal":
            self.launch(self.accelerator.kernel_seconds(args[0].nbytes + args[1].nbytes))
            self.launch(self.accelerator.shortest_kernel_seconds)  # whether all are
            self._copy(1, is_asynchronous=False)
            return self._provenance.equal(*args)
        is_asynchronous = bool(kwargs.get("non_blocking"))
        if name == "_to_copy" and not isinstance(args[0], FakeTensor):
            with self._fake:
                copy = torch.empty(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype, device=self.device)
            self._copy(copy.nbytes, is_asynchronous)
            return copy
        if name == "_to_copy" and kwargs.get("device") == torch.device("cpu"):
            copy = torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
            self._copy(copy.nbytes, is_asynchronous)
            return copy
        if name == "copy_" and not (isinstance(args[0], FakeTensor) and isinstance(args[1], FakeTensor)):
            self._copy(args[0].nbytes, is_asynchronous or bool(args[2:] and args[2]))
            if isinstance(args[0], FakeTensor):
                self._provenance.write(args[0], self._provenance.new())
            return args[0]
        return NotImplemented

    def _copy(self, num_bytes: int, is_asynchronous: bool) -> None:
        """Copy bytes between host and device; unless it is asynchronous, the host waits for the stream."""
        self._num_unrepeatable += 1
        self.launch(max(num_bytes / HOST_COPY_BYTES_PER_SECOND, self.accelerator.shortest_kernel_seconds))
        if not is_asynchronous:
            self.streams[-1].synchronize()

    def _new_stream(self, *_: Any, **__: Any) -> Stream:
        self._made.append(Stream(self))
        return self._made[-1]

    # Collectives.

    def _collective(self, func: Any, args: tuple) -> Any:
        """Record a collective of c10d and return what its operation returns."""
        received, sent = args[:2]
        group = dist.ProcessGroup.unbox(args[2])
        if op_cost.name_of(func) == "alltoall_base_":
            shares = _shares(sent, group.size(), args[4]), _shares(received, group.size(), args[3])
            return self._work(self._record(group, *shares))
        if op_cost.name_of(func) == "_allgather_base_":
            return received, self._work(self._record(group, *_gathered(sent, group.size()), is_gather=True))
        raise NotImplementedError(f"{func} on an emulated accelerator")

    def _work(self, collective: RecordedCollective) -> Any:
        def wait(*_: Any) -> bool:
            self._wait(collective)
            return True

        return torch._C._distributed_c10d.PythonCallbackWork(wait).boxed()

    def _functional_collective(self, func: Any, args: tuple) -> torch.Tensor:
        """Record a functional collective and return its result, which :meth:`_wait_tensor` waits for."""
        if op_cost.name_of(func) == "_wrap_tensor_autograd":
            return AsyncCollectiveTensor(args[0])
        with self._fake:
            received = func(*args)
        sent, group = args[0], args[-1]
        if isinstance(group, str):
            group = dist.distributed_c10d._resolve_process_group(group)
        if op_cost.name_of(func) == "all_to_all_single":
            shares = _shares(sent, group.size(), args[2]), _shares(received, group.size(), args[1])
        elif op_cost.name_of(func) == "all_gather_into_tensor":
            shares = _gathered(sent, group.size())
        else:
            raise NotImplementedError(f"{func} on an emulated accelerator")
        is_gather = op_cost.name_of(func) == "all_gather_into_tensor"
        received.cocodiff_collective = self._record(group, *shares, is_gather)
        return received

    def _wait_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Let the current stream wait for the collective that a tensor comes from, once; return the tensor."""
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.elem
        collective = getattr(tensor, "cocodiff_collective", None)
        if collective is not None:
            del tensor.cocodiff_collective
            self._wait(collective)
        return tensor

    def _record(
        self, group: dist.ProcessGroup, sent: list[int], received: list[int], is_gather: bool = False
    ) -> RecordedCollective:
        """Record a collective that starts behind the current stream.

        Args:
            group: the ranks; this one is the first of them.
            sent: bytes for each of them.
            received: bytes from each of them.
            is_gather: whether all of them are sent the same block.
        """
        self.spend_host_time(self.accelerator.collective_host_seconds)
        start = self.streams[-1].tail.latest(self.host_time)
        pattern = GroupPattern.of(dist.get_process_group_ranks(group))
        sizes = tuple(sent), tuple(received)
        collective = RecordedCollective(pattern, start, *sizes, is_gather, self.num_steps)
        self.program.collectives.append(collective)
        self._last[pattern] = collective
        self._num_unrepeatable += 1
        return collective

    def _wait(self, collective: RecordedCollective) -> None:
        """Let the current stream wait for a collective; those of earlier steps have ended."""
        if collective.step == self.num_steps:
            stream = self.streams[-1]
            stream.tail = stream.tail.after_collective(collective)


class _Operations(TorchDispatchMode):
    """Context in which the operations of PyTorch run on an emulated accelerator."""

    def __init__(self, device: EmulatedAccelerator) -> None:
        super().__init__()
        self._device = device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and the wrapper for that takes time

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return self._device.run(func, args, kwargs or {})


def _shares(tensor: torch.Tensor, ranks: int, rows: list[int] | None) -> list[int]:
    """Return the bytes of a tensor that belong to each rank: split along its first dim, equally if not given."""
    if not rows:
        return [tensor.nbytes // ranks] * ranks
    row_bytes = tensor.nbytes // max(1, tensor.shape[0])
    return [row_bytes * count for count in rows]


def _gathered(sent: torch.Tensor, ranks: int) -> tuple[list[int], list[int]]:
    return ([sent.nbytes] * ranks,) * 2


def _pending_view(view: torch.Tensor, source: torch.Tensor) -> AsyncCollectiveTensor:
    """Return a view of a collective's result that is waited for when it is used, unless the result was."""
    if (collective := getattr(source, "cocodiff_collective", None)) is not None:
        view.cocodiff_collective = collective
    return AsyncCollectiveTensor(view)


def _address_of(original: Callable[[torch.Tensor], int]) -> Callable[[torch.Tensor], int]:
    """Return torch.Tensor.data_ptr with addresses for fake tensors, which tell views of the same memory."""

    def address(tensor: torch.Tensor) -> int:
        if not isinstance(tensor, FakeTensor):
            return original(tensor)
        return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()

    return address


def _new_tensor(like: torch.Tensor, values: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    """Return what torch.Tensor.new_tensor does, by torch.tensor."""
    return torch.tensor(values, dtype=dtype or like.dtype, device=device or like.device)


def _copied_to_device(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return torch.tensor for the device: the original copies in C++, where no dispatch mode sees it."""

    @functools.wraps(original)
    def tensor(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        target = torch.device(device or torch.get_default_device())
        if target.type != DEVICE_TYPE:
            return original(*args, device=device, **kwargs)
        return original(*args, device="cpu", **kwargs).to(target)

    return tensor


class TritonKernels:
    """Context in which the codecs' Triton kernels are replaced by stand-ins that take their time on the device.

    Args:
        device: the emulated accelerator.
        module: the module of the kernels.
    """

    NAMES = ("_scores_kernel", "_encode_kernel", "_sums_kernel", "_decode_kernel")

    def __init__(self, device: EmulatedAccelerator, module: ModuleType) -> None:
        self._device, self._module, self._stack = device, module, contextlib.ExitStack()

    def __enter__(self) -> None:
        for name in self.NAMES:
            self._stack.enter_context(mock.patch.object(self._module, name, _TritonKernel(self._device)))
        self._stack.enter_context(mock.patch.object(kernels, "backend_for", lambda device: kernels.TRITON))

    def __exit__(self, *error: object) -> None:
        self._stack.close()


class _TritonKernel:
    """Stand-in for a Triton kernel."""

    def __init__(self, device: EmulatedAccelerator) -> None:
        self._device = device

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*values: Any, **_: Any) -> None:
            moved = op_cost.moved_bytes(value for value in values if isinstance(value, torch.Tensor))
            self._device.launch(self._device.accelerator.kernel_seconds(moved))

        return launch
