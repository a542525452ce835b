"""Records the collectives of c10d and the functional ones, and the waits for them."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from benchmarks.accelerator import op_cost
from benchmarks.accelerator.clock import Clock
from benchmarks.accelerator.program import RecordedCollective


class CollectiveRecorder:
    """Runs operations that are collectives.

    Args:
        clock: where they are recorded.
        fake: mode of the device's tensors.
    """

    def __init__(self, clock: Clock, fake: FakeTensorMode) -> None:
        self._clock, self._fake = clock, fake

    def run(self, func: Any, args: tuple) -> Any:
        """Record a collective of c10d and return what its operation returns."""
        received, sent = args[:2]
        group = dist.ProcessGroup.unbox(args[2])
        if op_cost.name_of(func) == "alltoall_base_":
            return self._work(self._start(group, _shares(sent, group.size(), args[4])))
        if op_cost.name_of(func) == "_allgather_base_":
            return received, self._work(self._start(group, [sent.nbytes] * group.size(), is_gather=True))
        raise NotImplementedError(f"{func} on an emulated accelerator")

    def _work(self, collective: RecordedCollective) -> Any:
        def wait(*_: Any) -> bool:
            self._clock.wait_for(collective)
            return True

        return torch._C._distributed_c10d.PythonCallbackWork(wait).boxed()

    def run_functional(self, func: Any, args: tuple) -> torch.Tensor:
        """Record a functional collective and return its result, which :meth:`wait_tensor` waits for."""
        name = op_cost.name_of(func)
        if name == "_wrap_tensor_autograd":
            return AsyncCollectiveTensor(args[0])
        with self._fake:
            received = func(*args)
        sent, group = args[0], args[-1]
        if isinstance(group, str):
            group = dist.distributed_c10d._resolve_process_group(group)
        if is_gather := name == "all_gather_into_tensor":
            shares = [sent.nbytes] * group.size()
        else:
            shares = _shares(sent, group.size(), args[2])
        received.cocodiff_collective = self._start(group, shares, is_gather)
        return received

    def wait_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Let the current stream wait for the collective that a tensor comes from, once; return the tensor."""
        if isinstance(tensor, AsyncCollectiveTensor):
            tensor = tensor.elem
        collective = getattr(tensor, "cocodiff_collective", None)
        if collective is not None:
            del tensor.cocodiff_collective
            self._clock.wait_for(collective)
        return tensor

    def _start(self, group: dist.ProcessGroup, sent: Sequence[int], is_gather: bool = False) -> RecordedCollective:
        return self._clock.start_collective(dist.get_process_group_ranks(group), sent, is_gather)


def _shares(tensor: torch.Tensor, ranks: int, rows: list[int] | None) -> list[int]:
    """Return the bytes of a tensor that belong to each rank: split along its first dim, equally if not given."""
    if not rows:
        return [tensor.nbytes // ranks] * ranks
    row_bytes = tensor.nbytes // max(1, tensor.shape[0])
    return [row_bytes * count for count in rows]
