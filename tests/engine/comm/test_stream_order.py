"""Communication on a mock device: values do not depend on the speed of streams, and the host never waits."""

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests import ranks
from tests.mock_device import CALLER, HAS_BACKENDS, DisorderError, MockDevice, Stream, register_mock_device
from tests.quick import covering, pairwise, slow_but
from xfuser_cocodiff.engine.attention.reshard import start_seq_to_heads
from xfuser_cocodiff.engine.attention.ulysses import UlyssesAttention
from xfuser_cocodiff.engine.comm import failure_detection
from xfuser_cocodiff.engine.comm.comm_stream import CommStream
from xfuser_cocodiff.engine.comm.head_group import HeadGroup
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.policy import PlanPolicy
from xfuser_cocodiff.engine.comm.stages import Stages
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.compression import codecs, link_reference
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.codecs import EXACT, Codec
from xfuser_cocodiff.engine.compression.layer_codecs import CodecStats, LayerCodecs
from xfuser_cocodiff.engine.compression.link_reference import ADAPTIVE
from xfuser_cocodiff.engine.kernels import quantize
from xfuser_cocodiff.engine.topology.plans import Plan, Stage
from xfuser_cocodiff.engine.topology.topology import Topology

pytestmark = pytest.mark.skipif(not HAS_BACKENDS, reason="needs a PyTorch that supports devices written in Python")

TOPOLOGY = Topology.parse("2x2", 4)
LAYERS = STEPS = 4
PLANS = ("flat", "hierarchical")
CODECS = {
    "bits": Codec(bits=2, predictor=ADAPTIVE),
    "drift": Codec(bits=2, token_fraction=0.5, predictor=0.5),
    "change": Codec(token_fraction=0.5, score="change"),
    "random": Codec(token_fraction=0.5, score="random"),
}
BOTH = (False, True)
THREADS = ((False, False), (True, False), (True, True))
"""Whether messages are staged through host memory, and whether the thread that does so is late."""


@functools.cache
def device() -> torch.device:
    """Return the mock device of this process."""
    return register_mock_device()


def make_tables() -> None:
    """Replace tables that a process creates once, by copies that the host waits for."""
    scales, maxima = (torch.zeros(size, device=device()) for size in (256, 255))
    shifts = torch.zeros(8, dtype=torch.uint8, device=device())
    weights = {grid: torch.zeros(grid.per_byte, device=device()) for grid in quantize.GRIDS.values()}
    digits = {grid: torch.zeros(256, grid.per_byte, device=device()) for grid in quantize.GRIDS.values()}
    gains = {links: torch.zeros(links, dtype=torch.uint8, device=device()) for links in (1, 2, 3)}
    quantize.scale_table, quantize._weights = lambda _: scales, lambda grid, _: weights[grid]
    quantize._digits = lambda grid, _: digits[grid]
    quantize._int8_tables = lambda _: (maxima, scales, scales)
    codecs._shifts = lambda _: shifts
    link_reference._same_gain = lambda gain, links, _: gains[links]


def group_of(stage: Stage, topology: Topology) -> SimpleNamespace:
    """Return a mock process group of a stage."""
    size = math.prod(topology.shape[dim] for dim in stage)
    return SimpleNamespace(size=lambda: size, rank=lambda: 0)


def mesh_of(plan: str, staged: bool, topology: Topology = TOPOLOGY, comm_stream: CommStream | None = None) -> Mesh:
    """Return a mesh of mock process groups."""
    parsed = Plan.parse(plan, topology)
    plans = parsed, Plan.hierarchical_gather(topology)
    groups = {stage: group_of(stage, topology) for plan in plans for stage in plan.stages}
    stages = Stages(groups, device(), staged)
    return Mesh(topology, stages, PlanPolicy(lambda nbytes: parsed), comm_stream or CommStream(device(), staged))


SINGLE_STAGE = "node, single stage"
GATHERED = "node, K and V gathered"
SLOW = ["node", "all", SINGLE_STAGE, GATHERED]
"""The slow axes, whether coded all-to-alls are single-stage, and whether K and V are gathered instead."""


def partition_of(slow: str, staged: bool) -> tuple[Mesh, AxisPartition]:
    """Return a mesh and its slow and fast axes."""
    mesh = mesh_of("hierarchical", staged)
    if slow == "all":
        return mesh, AxisPartition((0, 1), (2, 2), 0, mesh, None, 0)
    parts = [mesh_of("flat", staged, Topology.named(**{name: 2})).as_part_of(mesh, name) for name in ("node", "gpu")]
    return mesh, AxisPartition((0,), (2, 2), 0, *parts, 0)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_group: HeadGroup) -> torch.Tensor:
    return (query @ key.transpose(-1, -2)).softmax(-1) @ value


def run(
    mesh: Mesh,
    groups: int,
    v_first: bool,
    codecs_of_layers: Iterator[LayerCodecs | None],
    gather: AxisPartition | None = None,
) -> None:
    """Run the layers of a transformer: each computes the input of the next one and frees the rest."""
    hidden = torch.randn(2, 8, 8, 16, device=device())
    for layer_codecs in codecs_of_layers:
        value = hidden * 3
        ulysses = UlyssesAttention(mesh, groups, layer_codecs=layer_codecs, gather=gather)
        if v_first:
            ulysses.start_value(value)
        query, key = hidden + 1, hidden - 1
        hidden = ulysses.run(query, key, value, attend)


def lossless(rank: int, plan: str) -> None:
    for groups, v_first, (staged, late) in itertools.product((1, 2), BOTH, THREADS):
        with MockDevice(late) as mock_device:
            run(mesh_of(plan, staged), groups, v_first, iter([None] * LAYERS))
        # Elsewhere it would only keep memory: the comm stream is ordered after all uses of freed memory.
        assert staged or not mock_device.recorded


@pytest.mark.parametrize("plan", slow_but(PLANS[1:], PLANS))
def test_lossless_communication_is_ordered(plan: str) -> None:
    ranks.run(lossless, 1, plan)


def gathered(rank: int, slow: str) -> None:
    for groups, v_first, (staged, late) in itertools.product((1, 2), BOTH, THREADS):
        with MockDevice(late):
            mesh, partition = partition_of(slow, staged)
            run(mesh, groups, v_first, iter([None] * LAYERS), partition)


@pytest.mark.parametrize("slow", slow_but(["all"], ["node", "all"]))
def test_gathered_k_and_v_are_ordered(slow: str) -> None:
    ranks.run(gathered, 1, slow)


def mixed_plans(rank: int) -> None:
    """Send a large message in two stages, then a small one in a single stage."""
    flat, hierarchical = (Plan.parse(plan, TOPOLOGY) for plan in PLANS)
    groups = {
        stage: SimpleNamespace(size=lambda: TOPOLOGY.size, rank=lambda: 0)
        for stage in (*flat.stages, *hierarchical.stages)
    }
    small, large = (torch.Size((1, 4, tokens, 16)) for tokens in (2, 8))
    policy = PlanPolicy(lambda nbytes: hierarchical if nbytes == large.numel() * 4 else flat)
    with MockDevice() as mock_device:
        mesh = Mesh(TOPOLOGY, Stages(groups, device()), policy, CommStream(device()))
        handles = [
            start_seq_to_heads([torch.randn(size, device=device())], mesh, Label("v")) for size in (large, small)
        ]
        networks = list(mock_device._networks.values())
        for handle in handles:
            handle.wait()
    *stages, single = networks
    assert len(stages) == 2
    assert all(single.clock[stage.name] for stage in stages), "the small message may overtake the large one"


def test_a_single_stage_waits_for_earlier_messages_in_stages() -> None:
    ranks.run(mixed_plans, 1)


def coded(rank: int, slow: str, codec: Codec, uses_triton: bool, v_first_once: bool) -> None:
    for (staged, late), v_first in zip(THREADS, (v_first_once, not v_first_once, v_first_once), strict=True):
        with MockDevice(late) as mock_device, mock_device.by_triton() if uses_triton else nullcontext():
            make_tables()
            mesh, partition = partition_of(slow, staged)
            layers = codecs_by_step(partition, codec, slow == SINGLE_STAGE, slow == GATHERED)
            run(mesh, 1, v_first, layers, partition if slow == GATHERED else None)
        assert (mock_device.recorded > 0) is staged


def codecs_by_step(
    partition: AxisPartition, codec: Codec, single_stage: bool, gathers_kv: bool = False
) -> Iterator[LayerCodecs]:
    """Yield the codecs of one layer, step by step."""
    link_states, stats = {}, CodecStats()
    for step in range(STEPS):
        codecs_of = dict.fromkeys("qkvo", codec if step else EXACT)
        yield LayerCodecs(partition, codecs_of, link_states, stats, step, single_stage=single_stage)
        if step == 1:  # as after an exceeded memory budget
            for link_state in link_states.values():
                if gathers_kv:
                    partition.slow.comm_stream.start("convert references", link_state.to_int8).wait()
                    continue
                link_state.to_int8(partition.fast.comm_stream if partition.fast and not single_stage else None)


QUICK = [
    ("node", "bits", True, True),
    ("all", "drift", True, False),
    (GATHERED, "change", False, True),
    (SINGLE_STAGE, "drift", True, True),
    ("node", "change", True, False),
]


@pytest.mark.parametrize(
    ("slow", "codec", "uses_triton", "v_first_once"),
    slow_but(QUICK, dict.fromkeys([*QUICK, *covering(itertools.product(SLOW, CODECS, BOTH, BOTH), 2)])),
)
def test_coded_communication_is_ordered(slow: str, codec: str, uses_triton: bool, v_first_once: bool) -> None:
    """With V first on one kind of thread or on the two others."""
    ranks.run(coded, 1, slow, CODECS[codec], uses_triton, v_first_once)


def timing_streams(rank: int, plan: str) -> list[str]:
    """Return the streams that record the times of all-to-alls, with V first and two head groups."""
    seen = []

    class Event:
        device = device()

        def __init__(self, *_: object, **__: object) -> None:
            """Ignore the device: an event belongs to the stream that records it."""

        def record(self) -> None:
            seen.append(mock_device.streams[-1].name)

    with MockDevice() as mock_device, mock.patch.object(torch, "Event", Event):
        mesh = mesh_of(plan, False)
        mesh.traffic.timed = True
        run(mesh, 2, True, iter([None] * LAYERS))
    return seen


@pytest.mark.parametrize("plan", ["flat", "hierarchical"])
def test_times_are_recorded_on_streams_without_computation(plan: str) -> None:
    """The caller's stream reaches the end of a collective only after its computation."""
    seen = ranks.run(timing_streams, 1, plan)[0]
    stages, all_to_alls = {"flat": 1, "hierarchical": 2}[plan], LAYERS * 5
    assert len(seen) == 2 * stages * all_to_alls
    assert CALLER not in seen


def count_deadlines(rank: int, staged: bool) -> int:
    """Return the number of collectives with a deadline, which keeps none of their tensors alive."""
    deadlines = []

    class Event:
        def __init__(self, *_: object) -> None:
            """Ignore the device."""

        def record(self) -> None:
            """Ignore the stream."""

        def query(self) -> bool:
            return False

    recording = mock.patch.multiple(
        failure_detection,
        set_deadline=lambda *values: deadlines.append(values),
        is_heartbeat_running=lambda: True,
    )
    with MockDevice(), recording, mock.patch.object(torch, "Event", Event):
        run(mesh_of("hierarchical", staged), 2, True, iter([None] * LAYERS))
    for is_done, _, label, _ in deadlines:
        assert isinstance(is_done.__self__, Event) and label in ("node", "gpu")
    return len(deadlines)


def test_collectives_that_the_host_does_not_wait_for_have_deadlines() -> None:
    """Without one the backend ends the process and does not name the unresponsive rank."""
    assert ranks.run(count_deadlines, 1, False) == [2 * LAYERS * 5]
    assert ranks.run(count_deadlines, 1, True) == [0]  # the comm stream's thread waits, and names it


def break_order(name: str) -> None:
    """Remove one of the calls that keep operations in order."""
    follow = Stream.wait_event
    broken: dict[str, tuple[type, str, Callable]] = {
        "the comm stream's wait": (
            Stream,
            "wait_event",
            lambda self, mark: CALLER in self.name and follow(self, mark),
        ),
        "the caller's wait": (Stream, "wait_event", lambda self, mark: CALLER in self.name or follow(self, mark)),
        "record_stream": (MockDevice, "_record_stream", lambda *_: None),
        "synchronize": (Stream, "synchronize", lambda self: None),
    }
    setattr(*broken[name])


def run_broken(rank: int, broken: str, staged: bool) -> str:
    break_order(broken)
    with MockDevice(late=staged), pytest.raises(DisorderError) as error:
        run(mesh_of("hierarchical", staged), 2, True, iter([None] * LAYERS))
    return str(error.value)


@pytest.mark.parametrize(
    ("broken", "staged", "message"),
    [
        ("the comm stream's wait", False, "a collective on network .* written by the caller's stream"),
        ("the caller's wait", False, "on the caller's stream: .* written by stream 1, which may not have finished"),
        ("record_stream", True, "of stream 1 was freed, and the caller's stream may still use it"),
        ("synchronize", True, "a collective on the host: pinned memory, written by stream 1"),
    ],
)
def test_mock_device_detects_disorder(broken: str, staged: bool, message: str) -> None:
    assert re.search(message, *ranks.run(run_broken, 1, broken, staged))


MAX_LAUNCHES = 12
"""Operations of a coded layer besides its kernels; small ones are dominated by their launch."""
SELECTION_LAUNCHES = 12
"""Operations that select tokens, pack and unpack the selection, and number the tokens at both ends."""


def coded_layer(slow: str, v_first: bool, share: float, shape: tuple[int, ...], dtype: torch.dtype) -> MockDevice:
    """Return a mock device with the launches of a layer whose tensors are all coded, at its fourth step."""
    codecs_of = {
        **dict.fromkeys("qkv", Codec(2, share, predictor=ADAPTIVE)),
        "o": Codec(1.6, predictor=ADAPTIVE),
    }
    with MockDevice() as mock_device, mock_device.by_triton():
        make_tables()
        mesh, partition = partition_of(slow, staged=False)
        query, key, value = (torch.empty(shape, dtype=dtype, device=device()) for _ in range(3))
        link_states: dict = {}
        for step in range(4):
            tensor_codecs = codecs_of if step else dict.fromkeys("qkvo", EXACT)
            layer_codecs = LayerCodecs(
                partition, tensor_codecs, link_states, CodecStats(), step, single_stage=slow == SINGLE_STAGE
            )
            mock_device.launched.clear()
            mock_device.moved.clear()
            sent = start_seq_to_heads([value], mesh, Label("v"), layer_codecs) if v_first else None
            ulysses = UlyssesAttention(mesh, early_value=sent, layer_codecs=layer_codecs)
            ulysses.run(query, key, value, lambda query, *_: query)
        return mock_device


def by_kernels_and_others(counted: Counter[str]) -> tuple[int, int]:
    """Return what a counter has of Triton kernels, and of other operations."""
    kernels = sum(count for name, count in counted.items() if name.endswith("_kernel"))
    return kernels, counted.total() - kernels


def launches(rank: int, slow: str, v_first: bool, share: float) -> tuple[int, int]:
    return by_kernels_and_others(coded_layer(slow, v_first, share, (1, 8, 8, 16), torch.float32).launched)


@pytest.mark.parametrize(
    ("slow", "v_first", "share"),
    slow_but([("node", True, 0.5), (GATHERED, False, 1.0)], covering(itertools.product(SLOW, BOTH, [1.0, 0.5]), 2)),
)
def test_coded_layer_has_few_launches(slow: str, v_first: bool, share: float) -> None:
    [(kernels, others)] = ranks.run(launches, 1, slow, v_first, share)
    # One launch encodes a message, and one decodes it: Q, K and V together, or V first, and O. One scores V's tokens,
    # and one puts the selection in order at each end.
    assert kernels == 2 * (3 if v_first else 2) + 3 * (share < 1)
    assert others <= MAX_LAUNCHES + SELECTION_LAUNCHES * (share < 1)


FLUX = (1, 24, 4608 // 4, 128)
"""Values of FLUX.1-dev at 1024 pixels on one of four ranks."""


def moved(rank: int, slow: str, share: float) -> tuple[int, int]:
    return by_kernels_and_others(coded_layer(slow, False, share, FLUX, torch.bfloat16).moved)


@pytest.mark.parametrize(("slow", "share"), pairwise(itertools.product(["node", "all", SINGLE_STAGE], [1.0, 0.5])))
def test_coded_layer_moves_few_bytes(slow: str, share: float) -> None:
    """Each end reads values or payload and two references, and writes one, and payload or values. Scores of V read all
    but the payload once more."""
    [(kernels, others)] = ranks.run(moved, 1, slow, share)
    size = math.prod(FLUX) * torch.bfloat16.itemsize
    remote = size * (3 if slow == "all" else 2) // 4
    payload = remote * (3 * 2 * share + 1.6) / 16
    least = 4 * 8 * remote + 2 * payload + (3 * remote if share < 1 else 0)
    assert least <= kernels <= 1.1 * least
    # Lossless, each of two stages reads and writes all tensors twice.
    assert others <= 2 * 4 * 4 * size / 2


MAX_GRID = 2**31 - 1, 65_535, 65_535
"""CUDA's limits of a grid."""
VIDEO = "HunyuanVideo, 129 frames"
TOKENS = {VIDEO: 33 * 45 * 80 + 256, "Wan, 81 frames": 21 * 45 * 80}
"""Tokens at 720p; a token covers four frames of 16 x 16 pixels."""


def grids(rank: int, tokens: int, heads: int) -> list[tuple[str, tuple[int, ...]]]:
    """Return the grids of all kernels of a layer at the smallest and the largest degree, with codecs and without."""
    launched, codec = [], Codec(2, 0.5, predictor=0.5)
    degrees = [each for each in range(2, 25, 2) if heads % each == 0]
    for degree, batch in itertools.product((degrees[0], degrees[-1]), (1, 2)):
        names = {"node": 2, "gpu": degree // 2} if degree > 2 else {"node": 2}
        topology = Topology.named(**names)
        with MockDevice() as mock_device, mock_device.by_triton():
            make_tables()
            mesh = mesh_of("flat", False, topology)
            node = mesh_of("flat", False, Topology.named(node=2), mesh.comm_stream) if degree > 2 else mesh
            fast = mesh_of("flat", False, Topology.named(gpu=degree // 2), mesh.comm_stream) if degree > 2 else None
            partition = AxisPartition((0,), tuple(names.values()), 0, node, fast, 0)
            query = torch.empty(batch, heads, -(-tokens // degree), 128, dtype=torch.bfloat16, device=device())
            link_states: dict = {}
            for codecs_of in (None, dict.fromkeys("qkvo", EXACT), dict.fromkeys("qkvo", codec)):
                layer_codecs = codecs_of and LayerCodecs(partition, codecs_of, link_states, CodecStats())
                UlyssesAttention(mesh, layer_codecs=layer_codecs).run(query, query, query, lambda query, *_: query)
            launched += mock_device.grids
    return launched


@pytest.mark.parametrize(("video", "heads"), slow_but([(VIDEO, 24)], itertools.product(TOKENS, [24, 40])))
def test_grids_of_long_videos_are_within_cuda_limits(video: str, heads: int) -> None:
    [launched] = ranks.run(grids, 1, TOKENS[video], heads)
    assert {name for name, _ in launched} == {f"_{name}_kernel" for name in ("scores", "order", "encode", "decode")}
    for name, grid in launched:
        assert all(0 < size <= most for size, most in zip(grid, MAX_GRID, strict=False)), (name, grid)


def wait_for(rank: int, what: str) -> None:
    operations: dict[str, Callable[[torch.Tensor], object]] = {
        "a value": lambda values: bool(values.any()),
        "a copy": lambda values: values.to("cpu"),
    }
    with MockDevice(), pytest.raises(DisorderError, match=f"the host waits for {what}"):
        operations[what](torch.zeros(3, device=device()))


@pytest.mark.parametrize("what", ["a value", "a copy"])
def test_mock_device_detects_waits_of_the_host(what: str) -> None:
    ranks.run(wait_for, 1, what)
