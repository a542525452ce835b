"""A mock device: checks the order of operations on an accelerator's streams instead of executing them.

Tensors on it have no values (PyTorch's fake tensors). Every operation, event and wait advances vector clocks
(F. Mattern, "Virtual time and global states of distributed systems", 1988), and two uses of the same memory, one of
them a write, must be ordered by them. So one run covers all relative speeds of streams, which runs with random delays
do not. Two more mistakes are detected: memory freed while a stream other than the allocating one may still use it,
since the allocator hands it to the next request on the allocating stream; and operations for which the host waits.

Operations are counted if a device would have to launch something for them, stand-ins for Triton kernels included
(:meth:`MockDevice.by_triton`).
"""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.accelerator import op_cost
from xfuser_cocodiff.engine.comm import comm_stream, stages

CALLER = "the caller's stream"
PINNED = "pinned memory"
UNMARKED_VIEWS = ("aten._unsafe_view.default", "aten.alias.default", "aten.detach.default")
"""Operations that return views without declaring it."""
HAS_BACKENDS = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
"""Whether this PyTorch supports devices written in Python."""


def register_mock_device() -> torch.device:
    """Register the mock device in this process, permanently, and return it."""
    backend_registration._setup_privateuseone_for_python_backend("mock")
    return torch.device("mock", 0)


class DisorderError(AssertionError):
    """A race that would corrupt values on a real device, sometimes."""


class Agent:
    """A sequential executor, the host or a stream, with its vector clock."""

    def __init__(self, name: str) -> None:
        self.name, self.clock = name, Counter()

    def follow(self, clock: Counter) -> None:
        """Order everything from now on after what a clock has seen."""
        self.clock |= clock

    def tick(self) -> None:
        """Count an operation of this agent."""
        self.clock[self.name] += 1


class Event(Counter):
    """torch.Event, as far as the plugin uses it: the clock of a stream."""

    host: Agent

    def synchronize(self) -> None:
        self.host.follow(self)


class Stream(Agent):
    """torch.Stream, as far as the plugin uses it."""

    def __init__(self, name: str, device: "MockDevice") -> None:
        super().__init__(name)
        self._device = device

    def record_event(self) -> Event:
        self._device.sweep()
        self.follow(self._device.host.clock)
        event = Event(self.clock)
        event.host = self._device.host
        return event

    def wait_event(self, event: Counter) -> None:
        self._device.sweep()
        self.follow(event)

    def synchronize(self) -> None:
        self._device.sweep()
        self._device.host.follow(self.clock)

    def __enter__(self) -> None:
        self._device.streams.append(self)

    def __exit__(self, *_: object) -> None:
        self._device.streams.pop()


@dataclass
class Memory:
    """The latest uses of a storage."""

    alive: StorageWeakRef
    name: str
    home: Agent
    """Agent that allocated it, and whose next request may receive it."""
    reads: Counter = field(default_factory=Counter)
    writes: Counter = field(default_factory=Counter)


class MockKernel:
    """Stand-in for a Triton kernel that records its grid and arguments."""

    def __init__(self, kernel: Any, device: "MockDevice") -> None:
        self._argument_names, self._name, self._device = kernel.arg_names, kernel.__name__, device

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*values: Any, **_: Any) -> None:
            self._device.launch(self._name, grid, dict(zip(self._argument_names, values, strict=True)))

        return launch


WRITTEN = {
    "encode_kernel": ("payload", "new_reference", "new_codes", "gains", "sums", "energies", "counters"),
    "decode_kernel": ("new_reference", "new_codes", "data"),
}
"""Arguments that each kernel writes; all other tensors are read."""


class MockDevice(TorchDispatchMode):
    """Context in which tensors can be created on the mock device.

    Args:
        late: whether a thread executes its work when it is waited for, and not as soon as it is submitted.
    """

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.host, self.streams = Agent("the host"), [Stream(CALLER, self)]
        self._memory: dict[int, Memory] = {}
        self._freed: dict[str, list[Memory]] = {}
        """Freed memory by the agent that allocated it; the allocator may reuse it for that agent's next request."""
        self._networks: dict[int, Stream] = {}
        self._functional_works: dict[int, Any] = {}
        """Functional collectives in flight, by the memory that they write."""
        self._late, self._num_streams = late, 0
        self.launched: Counter[str] = Counter()
        """Number of launches by operation."""
        self.moved: Counter[str] = Counter()
        """Bytes that launches read and write, by operation."""
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "MockDevice":
        replaced = [
            (torch, "Stream", self._stream),
            (torch.accelerator, "current_stream", lambda device: self.streams[-1]),
            (stages.dist, "all_to_all_single", self._collective),
            (stages, "_all_gather", self._collective),
            (
                stages.functional,
                "all_to_all_single",
                lambda sent, *sizes_and_group: self._functional(sent, sizes_and_group[-1]),
            ),
            (stages, "_functional_all_gather", lambda sent, _, group: self._functional(sent, group, group.size())),
            (stages.functional, "wait_tensor", self._wait_for_tensor),
            (comm_stream, "ThreadPoolExecutor", lambda *_: MockExecutor(self, self._late)),
        ]
        for owner, name, replacement in replaced:
            self._stack.enter_context(mock.patch.object(owner, name, replacement))
        self._stack.enter_context(torch.inference_mode())
        self._stack.enter_context(FakeTensorMode())
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._stack.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run an operation on fake tensors and record its uses of memory."""
        kwargs = kwargs or {}
        self.sweep()
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException as error:
            raise DisorderError(f"{func}: the host waits for a value") from error
        except ValueError as error:  # for an impossible view, where real tensors raise RuntimeError
            raise RuntimeError(*error.args) from error
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        device_types = {tensor.device.type for tensor in (*inputs, *outputs)}
        agent = self.host if device_types == {"cpu"} else self.streams[-1]
        if len(device_types) > 1:
            is_asynchronous = _argument(func, args, kwargs, "non_blocking") and self._is_pinned(inputs + outputs)
            if not is_asynchronous:
                raise DisorderError(f"{func}: the host waits for a copy")
        self._use(agent, func, inputs, outputs, args, kwargs)
        return result

    def _is_pinned(self, tensors: list[torch.Tensor]) -> bool:
        """Return whether all tensors on the host are in pinned memory."""
        return all(self._memory[_storage(each)].name == PINNED for each in tensors if each.device.type == "cpu")

    def read_on_host(self, tensor: torch.Tensor) -> None:
        """Record that the host reads the values of a tensor in host memory."""
        self._access(self.host, tensor, False, "a read on the host")

    @contextlib.contextmanager
    def by_triton(self) -> Iterator[None]:
        """Encode with Triton kernels, replaced by stand-ins."""
        from xfuser_cocodiff.engine.codec import kernels, triton_kernels

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(kernels, "backend_for", lambda device: kernels.TRITON))
            for name in WRITTEN:
                kernel = MockKernel(getattr(triton_kernels, name), self)
                stack.enter_context(mock.patch.object(triton_kernels, name, kernel))
            scratch = functools.cache(triton_kernels._scratch.__wrapped__)  # that of this device
            stack.enter_context(mock.patch.object(triton_kernels, "_scratch", scratch))
            yield

    def launch(self, name: str, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
        """Record a kernel launch and its uses of memory."""
        self.sweep()
        agent = self.streams[-1]
        agent.follow(self.host.clock)
        agent.tick()
        self.launched[name] += 1
        by_name = [*arguments.items()]
        sums = {"sums": arguments["sums"][: grid[0]]} if "sums" in arguments else {}  # memory is of the largest launch
        self.moved[name] += _kernel_bytes(arguments | sums)
        for each in arguments.get("tensors", ()):  # of a message
            by_name += each._asdict().items()
            self.moved[name] += _kernel_bytes(each._asdict())
        for argument, tensor in by_name:
            if isinstance(tensor, torch.Tensor):
                self._access(agent, tensor, argument in WRITTEN[name], name)

    def _use(self, agent: Agent, func: Any, inputs: list, outputs: list, args: tuple, kwargs: dict) -> None:
        agent.follow(self.host.clock)
        agent.tick()
        input_storages = {_storage(tensor) for tensor in inputs}
        for tensor in outputs:
            if (key := _storage(tensor)) not in input_storages and key not in self._memory:
                self._allocate(agent, key, tensor, PINNED if kwargs.get("pin_memory") else str(func))
        if func.is_view or func.namespace == "prim" or "empty" in str(func):
            return
        if agent is not self.host and str(func) not in UNMARKED_VIEWS:
            self.launched[str(func)] += 1
            self.moved[str(func)] += op_cost.op_bytes(func, args, kwargs, outputs)
        written = {_storage(value) for value in _written(func, args, kwargs)}
        for tensor in inputs:
            self._access(agent, tensor, _storage(tensor) in written, str(func))
        for tensor in outputs:
            if _storage(tensor) not in input_storages:
                self._access(agent, tensor, True, str(func))

    def _allocate(self, agent: Agent, key: int, tensor: torch.Tensor, name: str) -> None:
        home = agent if tensor.device.type != "cpu" else self.host
        self._memory[key] = memory = Memory(StorageWeakRef(tensor.untyped_storage()), name, home)
        self._reuse(home)
        memory.writes[home.name] = home.clock[home.name]  # uses must come after those of the previous owner

    def _access(self, agent: Agent, tensor: torch.Tensor, writes: bool, name: str) -> None:
        key = _storage(tensor)
        if key not in self._memory:  # a constant, created before this context
            self._memory[key] = Memory(StorageWeakRef(tensor.untyped_storage()), "a constant", agent)
        memory = self._memory[key]
        for earlier in (memory.writes, memory.reads) if writes else (memory.writes,):
            for other, time in earlier.items():
                if agent.clock[other] < time:
                    kind = "written" if earlier is memory.writes else "read"
                    raise DisorderError(
                        f"{name} on {agent.name}: {memory.name}, {kind} by {other}, which may not have finished"
                    )
        (memory.writes if writes else memory.reads)[agent.name] = agent.clock[agent.name]

    def sweep(self) -> None:
        """Find memory that has been freed."""
        for key, memory in list(self._memory.items()):
            if memory.alive.expired():
                del self._memory[key]
                if memory.name == PINNED:  # its allocator tracks all copies
                    continue
                self._freed.setdefault(memory.home.name, []).append(memory)

    def _reuse(self, home: Agent) -> None:
        """Reuse an agent's freed memory; by its clock, all uses must have finished."""
        for memory in self._freed.pop(home.name, []):
            for name, time in (memory.reads | memory.writes).items():
                if home.clock[name] < time:
                    raise DisorderError(f"{memory.name} of {home.name} was freed, and {name} may still use it")

    def _stream(self, device: torch.device, priority: int = 0) -> Stream:
        self._num_streams += 1
        return Stream(f"stream {self._num_streams}", self)

    def _collective(self, received: torch.Tensor, sent: torch.Tensor, group: Any, async_op: bool) -> Any:
        """Run a collective on a stream of its group, as NCCL does, or in host memory, as gloo does."""
        assert async_op
        self.sweep()
        on_host = sent.device.type == "cpu"
        agent = self.host if on_host else self._network(group)
        agent.follow(self.host.clock)
        agent.tick()
        self._access(agent, sent, False, "a collective")
        self._access(agent, received, True, "a collective")
        end = agent.clock.copy()

        def wait(timeout: timedelta | None = None) -> None:
            if not on_host and timeout is not None:
                raise DisorderError("the host waits for a collective, as NCCL does if a timeout is given")
            if not on_host:
                self.streams[-1].follow(end)

        return SimpleNamespace(wait=wait)

    def _functional(self, sent: torch.Tensor, group: Any, copies: int = 1) -> torch.Tensor:
        """Run a functional collective and return a tensor that must be waited for."""
        received = sent.new_empty(copies * sent.numel())
        self._functional_works[_storage(received)] = self._collective(received, sent, group, async_op=True)
        return stages.functional.AsyncCollectiveTensor(received)

    def _wait_for_tensor(self, received: torch.Tensor) -> torch.Tensor:
        self._functional_works.pop(_storage(received)).wait()
        return received

    def _network(self, group: Any) -> Stream:
        """Return the stream of a group, ordered after the current stream."""
        if id(group) not in self._networks:
            self._networks[id(group)] = Stream(f"network {len(self._networks) + 1}", self)
        network = self._networks[id(group)]
        network.follow(self.streams[-1].clock)
        return network


class MockFuture(SimpleNamespace):
    """Future of a mock executor; a class of its own, because weak references need one."""


class MockExecutor:
    """ThreadPoolExecutor(1) that executes work in order, when it is submitted or when it is waited for.

    As in a new thread, the current stream is not the caller's.
    """

    def __init__(self, device: MockDevice, late: bool) -> None:
        self._device, self._late, self._queue = device, late, []
        self._streams = [Stream("a thread's stream", device)]

    def submit(self, work: Callable[[], Any]) -> Any:
        results: list[Any] = []

        def result() -> Any:
            while not results:
                self._queue.pop(0)()
            return results[0]

        def run() -> None:
            with mock.patch.object(self._device, "streams", self._streams):
                results.append(work())

        self._queue.append(run)
        if not self._late:
            result()
        return MockFuture(result=result, done=lambda: bool(results))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _kernel_bytes(arguments: dict[str, Any]) -> int:
    """Return the bytes of a Triton kernel's arguments; of those by slot, the bytes of other ranks' slots."""
    found = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    by_link = found.get("new_reference", found.get("reference"))
    for name in {"payload", "data", "values"} & found.keys():
        found[name] = found[name][: len(by_link)]
    return op_cost.moved_bytes(found.values())


def _argument(func: Any, args: tuple, kwargs: dict, name: str) -> Any:
    """Return the value of a named argument of an operation."""
    names = [argument.name for argument in func._schema.arguments]
    index = names.index(name) if name in names else len(args)
    return args[index] if index < len(args) else kwargs.get(name)


def _written(func: Any, args: tuple, kwargs: dict) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operation modifies in place."""
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (
                leaf
                for leaf in tree_leaves(_argument(func, args, kwargs, argument.name))
                if isinstance(leaf, torch.Tensor)
            )
