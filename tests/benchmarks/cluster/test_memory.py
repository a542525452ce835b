"""Full-size video models fit the device with link references wherever they fit it without.

They run on an emulated accelerator whose allocated memory is counted, with all of their blocks.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from benchmarks import bare_runtime, modes
from benchmarks.accelerator import device_type
from benchmarks.accelerator.device import EmulatedAccelerator
from benchmarks.accelerator.operations import Operations
from benchmarks.cluster import recording
from benchmarks.cluster.cell import Cell
from benchmarks.full_size import transformer as full_size
from tests import ranks
from xfuser_cocodiff.engine.compression.reference_memory import GIB
from xfuser_cocodiff.engine.topology.device_memory import DeviceMemory
from xfuser_cocodiff.tools.simulation import assumed_change
from xfuser_cocodiff.tools.simulation.communication import LayerCommunication
from xfuser_cocodiff.tools.simulation.machines import MACHINES
from xfuser_cocodiff.xdit.integration import activation
from xfuser_cocodiff.xdit.platforms import device_memory
from xfuser_cocodiff.xdit.session.session import Session
from xfuser_cocodiff.xdit.settings.ring_placement import UlyssesRingSplit

RESIDENT = {"wan2.1-14b": 2 * 5.68e9 + 0.25e9 + GIB, "hunyuanvideo": 2 * 8.15e9 + 0.5e9 + GIB}
"""Bytes beside the transformer: text encoders and VAE in bf16, and 1 GiB for CUDA's context and communicators."""
ALL_BLOCKS = 60
MODE = "balanced"
STEPS = 4
"""Enough for all references: from the third step on they are complete."""


Step = Callable[[Session], None]


class AllocatedBytes:
    """Bytes of all living tensors of the emulated accelerator."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count the tensors that operations return."""
        run = Operations.run

        def counting(operations: Operations, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
            result = run(operations, func, args, kwargs)
            for leaf in tree_leaves(result):
                tensor = leaf.elem if isinstance(leaf, AsyncCollectiveTensor) else leaf
                if isinstance(tensor, FakeTensor) and tensor.device.type != "cpu":
                    self._add(tensor.untyped_storage())
            return result

        with mock.patch.object(Operations, "run", counting):
            yield

    def _add(self, storage: torch.UntypedStorage) -> None:
        known = self._alive.get(storage._cdata)
        if known and not known[0].expired():
            return
        self.now += storage.nbytes() - (known[1] if known else 0)
        self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        if self.now > self.peak:
            self.sweep()
            self.peak = max(self.peak, self.now)

    def sweep(self) -> int:
        """Forget tensors that are gone, and return the bytes of all others."""
        for key, (storage, size) in list(self._alive.items()):
            if storage.expired():
                del self._alive[key]
                self.now -= size
        return self.now


@contextmanager
def on_two_nodes(cell: Cell, split: UlyssesRingSplit) -> Iterator[tuple[AllocatedBytes, Step]]:
    """Return a context with a rank of a model: its memory, and a function that runs a step."""
    dist.destroy_process_group()
    activation.activate()
    emulated, allocated = device_type.register(), AllocatedBytes()
    recording._start_xdit(split)
    with (
        EmulatedAccelerator(cell.machine.accelerator) as emulator,
        allocated.counted(),
        torch.inference_mode(),
    ):
        transformer = full_size.build(cell.workload, cell.blocks, emulated)

        def step(session: Session) -> None:
            emulator.begin_step()
            for _ in range(transformer.workload.calls):
                transformer.call(cell.resolution)
            session.end_step()
            emulator.end_step()

        yield allocated, step


def stock_peak(rank: int, cell: Cell, split: UlyssesRingSplit) -> int:
    with on_two_nodes(cell, split) as (allocated, step):
        bare_runtime.use_session(Session())
        step(Session())
        return allocated.peak


class CodedRun(NamedTuple):
    """Memory of a coded run, in bytes."""

    peak: int
    left: int
    """Bytes that its end leaves beyond those before it."""
    budget: float
    line: str
    """Log line of the budget."""


def coded_run(rank: int, cell: Cell, split: UlyssesRingSplit, capacity: float) -> CodedRun:
    """Run some steps on a device of some bytes."""
    with on_two_nodes(cell, split) as (allocated, step):
        lines, before = list[str](), allocated.sweep()

        def read() -> DeviceMemory:
            return DeviceMemory(capacity - RESIDENT[cell.model] - allocated.sweep(), capacity)

        with mock.patch.object(device_memory, "reader", lambda _: read):
            session = modes.new_session(MODE, cell.profile, split, device_type.DEVICE_TYPE)
        session.runtime.reporter.info = session.runtime.reporter.warn = lines.append
        bare_runtime.use_session(session)
        with recording.independent_heads_and_queries():
            session.begin_run(assumed_change.STEPS)
            for _ in range(STEPS):
                step(session)
            session.end_run()
            line = next(line for line in lines if "memory budget" in line)
            return CodedRun(allocated.peak, allocated.sweep() - before, session.runtime.store.budget, line)


@pytest.mark.slow  # test_reference_memory has the budget's arithmetic, and its ranks
@pytest.mark.parametrize(("model", "degree", "capacity"), itertools.product(RESIDENT, (8, 16), (80e9, 48e9)))
def test_video_models_fit_wherever_stock_fits(model: str, degree: int, capacity: float) -> None:
    machine = replace(MACHINES["ethernet-100"], node_axes=(("gpu", degree // 2),))
    cell, split = Cell(machine, 2, model, 720, blocks=ALL_BLOCKS), UlyssesRingSplit(degree, 1)
    (stock,) = ranks.run(stock_peak, 1, cell, UlyssesRingSplit(8, degree // 8))
    (coded,) = ranks.run(coded_run, 1, cell, split, capacity)
    layer = LayerCommunication(cell.scenario, split, MODE)
    wanted = sum(call.predicted for call in layer.references()) * cell.workload.layers
    resident = RESIDENT[model]
    stock_gib, peak_gib, full_gib = (each / GIB for each in (stock + resident, coded.peak + resident, wanted))
    print(
        f"{model}, {degree} ranks, {capacity / GIB:.1f} GiB: stock {stock_gib:.1f}, coded {peak_gib:.1f}; {coded.line}"
    )
    assert stock + resident < capacity
    assert coded.peak + resident < capacity
    assert coded.left < GIB / 4  # no references are there while the VAE decodes
    # `cocodiff plan` knows what is coded.
    left_out = cell.scenario.layer_calls - layer.coded_layers(coded.budget)
    assert f"{full_gib:.3g} GiB per rank" in coded.line
    assert f": {left_out} of {cell.scenario.layer_calls} layers have none and send 8 bits" in coded.line
