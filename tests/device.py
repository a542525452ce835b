"""A device that is not there: what an accelerator's streams would do is checked for order instead of being done.

Tensors claim to lie on the device and have no values (PyTorch's fake tensors). Every operation, event and wait moves
vector clocks (F. Mattern, "Virtual time and global states of distributed systems", 1988), and two uses of one memory,
one of which writes, must be ordered by them. So one run stands for all speeds at which streams may go, which runs with
delays do not. Two more mistakes are found: memory that is dropped while a stream may still use it that did not allocate
it, since the allocator gives it to the next who asks on the stream that did; and operations for which the host waits.

Operations are counted, as far as a device would have to launch something for them; those of Triton's kernels that stand
in for them too (:meth:`Device.by_triton`).
"""

import contextlib
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

from xfuser_cocodiff.engine.comm import comm_stream, stages

CALLER = "the caller's stream"
PINNED = "pinned memory"
UNSEEN = ("aten._unsafe_view.default", "aten.alias.default", "aten.detach.default")
"""Operations that are views although they do not say so."""
HAS_BACKENDS = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
"""Whether this PyTorch knows devices that are not there."""


def pretend() -> torch.device:
    """A device that is not there. The process has it from then on, so it should be one of its own."""
    backend_registration._setup_privateuseone_for_python_backend("pretended")
    return torch.device("pretended", 0)


class DisorderError(AssertionError):
    """What would go wrong on a device, sometimes."""


class Agent:
    """What does one thing after the other: the host, or a stream."""

    def __init__(self, name: str) -> None:
        self.name, self.clock = name, Counter()

    def follow(self, clock: Counter) -> None:
        """Do what comes after all that a clock has seen."""
        self.clock |= clock

    def tick(self) -> None:
        """Do one thing more."""
        self.clock[self.name] += 1


class Stream(Agent):
    """torch.Stream, as far as the plugin uses it."""

    def __init__(self, name: str, device: "Device") -> None:
        super().__init__(name)
        self._device = device

    def record_event(self) -> Counter:
        self._device.sweep()
        self.follow(self._device.host.clock)
        return self.clock.copy()

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
    """Who used a storage, and when last."""

    alive: StorageWeakRef
    what: str
    home: Agent
    """Who gets it next."""
    reads: Counter = field(default_factory=Counter)
    writes: Counter = field(default_factory=Counter)
    known: set[str] = field(default_factory=set)
    """Streams that the allocator waits for by itself."""


class Kernel:
    """Stands in for one of Triton's: says by which grid it was launched, on what."""

    def __init__(self, kernel: Any, device: "Device") -> None:
        self._names, self._what, self._device = kernel.arg_names, kernel.__name__, device

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *given, **_: self._device.launch(self._what, grid, dict(zip(self._names, given, strict=True)))


WRITTEN = {
    "_scores_kernel": ("found",),
    "_encode_kernel": ("payload", "now", "sums"),
    "_sums_kernel": ("totals", "again"),
    "_decode_kernel": ("now", "target"),
}
"""Kernels, and what they write; all other tensors are read."""


class Device(TorchDispatchMode):
    """Within this context tensors may be made on it.

    Args:
        late: whether what a thread is to do is done when somebody waits for it, rather than at once.
    """

    def __init__(self, late: bool = False) -> None:
        super().__init__()
        self.host, self.streams = Agent("the host"), [Stream(CALLER, self)]
        self._memory: dict[int, Memory] = {}
        self._dropped: dict[str, list[Memory]] = {}
        """By whose it is: what the allocator may give to the next who asks on that stream."""
        self.recorded = 0
        """How often the allocator was told of another stream."""
        self._networks: dict[int, Stream] = {}
        self._late, self._made = late, 0
        self.launched: Counter[str] = Counter()
        """How often which operation was."""
        self.grids: list[tuple[str, tuple[int, ...]]] = []
        """Of Triton's kernels."""
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Device":
        replaced = [
            (torch, "Stream", self._stream),
            (torch.accelerator, "current_stream", lambda device: self.streams[-1]),
            (torch.Tensor, "record_stream", lambda *given: self._record_stream(*given)),
            (stages.dist, "all_to_all_single", self._all_to_all),
            (comm_stream, "ThreadPoolExecutor", lambda *_: Thread(self._late)),
        ]
        for place, name, new in replaced:
            self._stack.enter_context(mock.patch.object(place, name, new))
        self._stack.enter_context(torch.inference_mode())
        self._stack.enter_context(FakeTensorMode())
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._stack.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Do what can be done without values, and note who used which memory."""
        kwargs = kwargs or {}
        self.sweep()
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        try:
            result = func(*args, **kwargs)
        except DataDependentOutputException as error:
            raise DisorderError(f"{func}: the host waits for a value") from error
        except ValueError as error:  # of a fake tensor that cannot be viewed so; real ones raise this
            raise RuntimeError(*error.args) from error
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        places = {tensor.device.type for tensor in (*given, *made)}
        agent = self.host if places == {"cpu"} else self.streams[-1]
        if len(places) > 1 and not (_argument(func, args, kwargs, "non_blocking") and self._is_pinned(given + made)):
            raise DisorderError(f"{func}: the host waits for a copy")
        self._use(agent, func, given, made, args, kwargs)
        return result

    def _is_pinned(self, tensors: list[torch.Tensor]) -> bool:
        """Whether a device can read and write by itself what of it lies on the host."""
        return all(self._memory[_storage(each)].what == PINNED for each in tensors if each.device.type == "cpu")

    @contextlib.contextmanager
    def by_triton(self) -> Iterator[None]:
        """Encode by Triton's kernels, with stand-ins for the kernels themselves."""
        from xfuser_cocodiff.engine import kernels
        from xfuser_cocodiff.engine.kernels import triton_kernels

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(kernels, "backend_for", lambda device: kernels.TRITON))
            for name in WRITTEN:
                stack.enter_context(
                    mock.patch.object(triton_kernels, name, Kernel(getattr(triton_kernels, name), self))
                )
            yield

    def launch(self, name: str, grid: tuple[int, ...], given: dict[str, Any]) -> None:
        """Note what a kernel uses."""
        self.sweep()
        agent = self.streams[-1]
        agent.follow(self.host.clock)
        agent.tick()
        self.launched[name] += 1
        self.grids.append((name, grid))
        for what, tensor in given.items():
            if isinstance(tensor, torch.Tensor):
                self._access(agent, tensor, what in WRITTEN[name], name)

    def _use(self, agent: Agent, func: Any, given: list, made: list, args: tuple, kwargs: dict) -> None:
        agent.follow(self.host.clock)
        agent.tick()
        old = {_storage(tensor) for tensor in given}
        for tensor in made:
            if (key := _storage(tensor)) not in old and key not in self._memory:
                what = PINNED if kwargs.get("pin_memory") else str(func)
                home = agent if tensor.device.type != "cpu" else self.host
                self._memory[key] = memory = Memory(StorageWeakRef(tensor.untyped_storage()), what, home)
                self._give(home)
                memory.writes[home.name] = home.clock[home.name]  # those who use it must come after who had it before
        if func.is_view or func.namespace == "prim" or "empty" in str(func):
            return
        if agent is not self.host and str(func) not in UNSEEN:
            self.launched[str(func)] += 1
        written = {_storage(value) for value in _written(func, args, kwargs)}
        for tensor in given:
            self._access(agent, tensor, _storage(tensor) in written, str(func))
        for tensor in made:
            if _storage(tensor) not in old:
                self._access(agent, tensor, True, str(func))

    def _access(self, agent: Agent, tensor: torch.Tensor, writes: bool, what: str) -> None:
        key = _storage(tensor)
        if key not in self._memory:  # a constant, from before
            self._memory[key] = Memory(StorageWeakRef(tensor.untyped_storage()), "a constant", agent)
        memory = self._memory[key]
        for before in (memory.writes, memory.reads) if writes else (memory.writes,):
            for name, at in before.items():
                if agent.clock[name] < at:
                    kind = "written" if before is memory.writes else "read"
                    raise DisorderError(
                        f"{what} on {agent.name}: {memory.what}, {kind} by {name}, may not be through with that"
                    )
        (memory.writes if writes else memory.reads)[agent.name] = agent.clock[agent.name]

    def sweep(self) -> None:
        """Look at what has been dropped."""
        for key, memory in list(self._memory.items()):
            if memory.alive.expired():
                del self._memory[key]
                if memory.what == PINNED:  # its allocator knows of every copy
                    continue
                self._dropped.setdefault(memory.home.name, []).append(memory)

    def _give(self, home: Agent) -> None:
        """Give memory that was dropped to a stream, which all who used it must be through with by its clock."""
        for memory in self._dropped.pop(home.name, []):
            for name, at in (memory.reads | memory.writes).items():
                if name not in memory.known and home.clock[name] < at:
                    raise DisorderError(f"{memory.what} of {home.name} was dropped, and {name} may use it")

    def _stream(self, device: torch.device, priority: int = 0) -> Stream:
        self._made += 1
        return Stream(f"stream {self._made}", self)

    def _record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.recorded += 1
        self._memory[_storage(tensor)].known.add(stream.name)

    def _all_to_all(self, received: torch.Tensor, sent: torch.Tensor, group: Any, async_op: bool) -> Any:
        """As NCCL does it, on a stream of its own for each group; as gloo does it in the host's memory."""
        assert async_op
        self.sweep()
        on_host = sent.device.type == "cpu"
        agent = self.host if on_host else self._network(group)
        agent.follow(self.host.clock)
        agent.tick()
        self._access(agent, sent, False, "an all-to-all")
        self._access(agent, received, True, "an all-to-all")
        end = agent.clock.copy()

        def wait(timeout: timedelta | None = None) -> None:
            if not on_host and timeout is not None:
                raise DisorderError("the host waits for a collective, as NCCL does where it is told how long")
            if not on_host:
                self.streams[-1].follow(end)

        return SimpleNamespace(wait=wait)

    def _network(self, group: Any) -> Stream:
        """A group's stream, behind what the current one holds."""
        if id(group) not in self._networks:
            self._networks[id(group)] = Stream(f"network {len(self._networks) + 1}", self)
        network = self._networks[id(group)]
        network.follow(self.streams[-1].clock)
        return network


class Found(SimpleNamespace):
    """What a thread has found, as a class of its own, which weak references need."""


class Thread:
    """ThreadPoolExecutor(1): in order, and at once, or when somebody waits."""

    def __init__(self, late: bool) -> None:
        self._late, self._queue = late, []

    def submit(self, work: Callable[[], Any]) -> Any:
        found: list[Any] = []

        def result() -> Any:
            while not found:
                self._queue.pop(0)()
            return found[0]

        self._queue.append(lambda: found.append(work()))
        if not self._late:
            result()
        return Found(result=result, done=lambda: bool(found))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _argument(func: Any, args: tuple, kwargs: dict, name: str) -> Any:
    """What an operation was given for an argument."""
    names = [argument.name for argument in func._schema.arguments]
    place = names.index(name) if name in names else len(args)
    return args[place] if place < len(args) else kwargs.get(name)


def _written(func: Any, args: tuple, kwargs: dict) -> Iterator[torch.Tensor]:
    """What an operation changes in its place."""
    for argument in func._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (
                leaf
                for leaf in tree_leaves(_argument(func, args, kwargs, argument.name))
                if isinstance(leaf, torch.Tensor)
            )
