"""Memory of link references: planned bytes equal allocated bytes, and a budget is met."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.coded_layers import encode, reporter
from xfuser_cocodiff.engine.codec.active_tokens import select_tokens
from xfuser_cocodiff.engine.codec.coded_tensor import CodedTensor, decode
from xfuser_cocodiff.engine.codec.link_reference import LinkReference
from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS
from xfuser_cocodiff.engine.compression.axis_partition import AxisLayout
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs, LinkState
from xfuser_cocodiff.engine.compression.layer_state import CodedCall
from xfuser_cocodiff.engine.compression.modes import BALANCED, PAPER, PRESETS, CodecSchedule
from xfuser_cocodiff.engine.compression.reference_memory import (
    GIB,
    LayerSizes,
    ReferenceBytes,
    default_budget,
)
from xfuser_cocodiff.engine.compression.runtime import CodecRuntime
from xfuser_cocodiff.engine.topology.device_memory import DeviceMemory

NUM_SLOW, HEAD_DIM = 3, 64
SHAPE = (NUM_SLOW - 1, 2, 2, 6, HEAD_DIM)
"""Links, groups, heads, tokens and head dim of one tensor."""


def layer_sizes(dtype: torch.dtype) -> LayerSizes:
    """Return the sizes of a layer that sends tensors of that shape to other slow coordinates."""
    value = torch.Size(SHAPE).numel() * NUM_SLOW // (NUM_SLOW - 1)
    return LayerSizes(4 * value, value, HEAD_DIM, dtype.itemsize)


def run_steps(
    link_states: dict, schedule: CodecSchedule, dtype: torch.dtype, steps: int, predicts: bool = True
) -> None:
    """Encode and decode some steps as collectives would."""
    generator = torch.Generator().manual_seed(0)
    for name in "vqko":
        link_state = link_states.setdefault(
            (name, ALL_HEADS), LinkState(*(LinkReference(schedule == PAPER) for _ in range(2)))
        )
        for step in range(steps):
            codec = schedule.codecs(step, 9, 2 if step and schedule.error else None)[name]
            codec = replace(codec, predicts=codec.predicts and predicts)
            values = torch.randn(SHAPE, generator=generator).to(dtype)
            active = select_tokens(values, link_state.sent, codec) if codec.token_fraction < 1 else None
            payload = torch.empty(len(values), codec.payload_bytes(SHAPE, dtype), dtype=torch.uint8)
            encode(CodedTensor(values, link_state.sent, codec, active, payload))
            decode([CodedTensor(torch.empty_like(values), link_state.received, codec, active, payload)])


@pytest.mark.parametrize("predicts", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mode", PRESETS)
def test_planned_bytes_equal_allocated_bytes(mode: str, dtype: torch.dtype, predicts: bool) -> None:
    schedule = PRESETS[mode]
    link_states: dict = {}
    run_steps(link_states, schedule, dtype, steps=4, predicts=predicts)
    allocated = sum(link_state.sent.nbytes + link_state.received.nbytes for link_state in link_states.values())
    if mode == "paper":  # here Q and K select tokens themselves; in a message they use V's selection
        allocated -= sum(link_states[name, ALL_HEADS].sent.last_values.nbytes for name in "qk")
    planned = ReferenceBytes.of(layer_sizes(dtype), schedule, NUM_SLOW)
    assert allocated == (planned.predicted if predicts else planned.single)


class Run:
    """A run with a memory budget, in which every layer allocates its references."""

    def __init__(
        self,
        budget: float | None,
        layers: int,
        memory: Callable[[], DeviceMemory | None] | None = None,
        min_over_ranks: Callable[[list[float]], list[float]] = list,
    ) -> None:
        self.logged: list[str] = []
        self.runtime = CodecRuntime(
            AxisLayout(NUM_SLOW, 1),
            "balanced",
            None,
            list,
            memory_budget=budget,
            reporter=reporter(self.logged),
            device_memory=memory,
            min_over_ranks=min_over_ranks,
        )
        self.layers = layers

    def begin(self, total: int | None = 9) -> None:
        self.runtime.begin_run(total)

    def step(self) -> list[bool]:
        """Run a step of a transformer, and return which layers have references."""
        found: list[LayerCodecs] = []
        for layer in range(self.layers):
            layer_codecs = self.runtime.layer_codecs(CodedCall(str(layer), layer, 0, layer_sizes(torch.bfloat16)))
            assert all(codec.bits for codec in layer_codecs.step.codecs.values()), "no layer is lossless"
            found.append(layer_codecs)
        # Later steps predict if no layer of the first one was too much.
        predicts = found[-1].step.codecs["k"].predicts
        for layer_codecs in found:
            if layer_codecs.step.keeps_references:
                run_steps(layer_codecs.link_states, BALANCED, torch.bfloat16, steps=3, predicts=predicts)
        self.runtime.end_step()
        return [each.step.keeps_references for each in found]


PREDICTED, SINGLE = ReferenceBytes.of(layer_sizes(torch.bfloat16), BALANCED, NUM_SLOW)


@pytest.mark.parametrize(
    ("budget", "allocated", "coded"),
    [
        (None, 4 * PREDICTED, 4),
        (4 * PREDICTED, 4 * PREDICTED, 4),
        (4 * PREDICTED - 1, 4 * SINGLE, 4),
        (4 * SINGLE, 4 * SINGLE, 4),
        (4 * SINGLE - 1, 3 * SINGLE, 3),
        (SINGLE - 1, 0, 0),
    ],
)
def test_memory_budget_is_met(budget: int | None, allocated: int, coded: int) -> None:
    run = Run(budget, layers=4)
    for _ in range(2):
        run.begin()
        for _ in range(3):
            assert run.step() == [True] * coded + [False] * (4 - coded)
            assert run.runtime.store.planned_bytes == run.runtime.store.nbytes == allocated
            assert run.runtime.reports[-1].exact_layers == 0
    logged = [line for line in run.logged if f"references of 4 layers: {4 * PREDICTED / GIB:.3g} GiB per rank" in line]
    assert len(logged) == (2 if coded < 4 else 1)  # a warning in every run, since a later one may be in another log
    limit = "--cocodiff_memory_budget sets a limit"
    if budget:
        limit = f"{budget / GIB:.3g} GiB by --cocodiff_memory_budget: {4 - coded} of 4 layers have none and send 8 bits"
    assert all(limit in line for line in logged), logged


LAYER = layer_sizes(torch.bfloat16)
LAYER_BYTES = LAYER.num_values * LAYER.value_bytes


@pytest.mark.parametrize(
    ("free", "total", "has_known_end", "budget"),
    [
        (100 * LAYER_BYTES, 0, True, 88 * LAYER_BYTES),  # 12 layers are reserved for the rest of the step
        (100 * LAYER_BYTES, 640 * LAYER_BYTES, True, 60 * LAYER_BYTES),  # or a sixteenth of the device
        (100 * LAYER_BYTES, 0, False, 44 * LAYER_BYTES),  # references may be there while the VAE decodes
        (10 * LAYER_BYTES, 0, True, -2 * LAYER_BYTES),
    ],
)
def test_default_budget_leaves_a_reserve(free: int, total: int, has_known_end: bool, budget: int) -> None:
    assert default_budget(DeviceMemory(free, total), LAYER, has_known_end) == budget


def free_for(budget: float) -> DeviceMemory:
    """Return memory whose default budget is this."""
    return DeviceMemory(budget + 12 * LAYER_BYTES, 0)


def test_default_budget_is_the_smallest_of_all_ranks_and_is_stated() -> None:
    reduced: list[list[float]] = []

    def min_over_ranks(values: list[float]) -> list[float]:
        reduced.append(values)
        return [min(value, 3 * SINGLE) for value in values]  # another rank has less memory

    run = Run(None, 4, memory=lambda: free_for(4 * PREDICTED), min_over_ranks=min_over_ranks)
    run.begin()
    for _ in range(3):
        assert run.step() == [True] * 3 + [False]
    assert reduced == [[4 * PREDICTED]]  # agreed once a run
    (line,) = [line for line in run.logged if "memory budget" in line]
    assert f"memory budget {3 * SINGLE / GIB:.3g} GiB by free memory: 1 of 4 layers have none and send 8 bits" in line
    assert f"{4 * PREDICTED / GIB:.3g} GiB per rank, {4 * SINGLE / GIB:.3g} GiB without prediction (in use)" in line


def test_runs_alike_decide_alike_while_memory_suffices() -> None:
    """Kernels and communicators load during the first run; a run of another kind measures anew."""
    free = iter(free_for(layers * SINGLE - lost) for layers, lost in [(3, 0), (3, GIB // 4), (4, 0), (2, 0), (3, GIB)])
    run = Run(None, 4, memory=lambda: next(free))
    coded = []
    for total in (9, 9, 9, 20, 9):
        run.begin(total)
        coded.append(run.step().count(True))
    assert coded == [3, 3, 3, 2, 0]


def test_bytes_across_slow_axes_leave_out_what_stays_on_the_rank() -> None:
    sizes = LayerSizes(num_values=1200, num_v_values=300, row_values=4, value_bytes=2)
    assert sizes.slow_axis_bytes(1, 1) == 0
    assert sizes.slow_axis_bytes(4, 1) == 2 * 900  # all-to-alls of Q, K, V and O
    assert sizes.slow_axis_bytes(1, 3) == 2 * (2 * 300) * 2  # K and V to each of two others
