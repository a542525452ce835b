"""Exchanges on a device that is not there: no order of its streams may change a value, and the host waits for none."""

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests import ranks
from tests.device import CALLER, HAS_BACKENDS, Device, DisorderError, Stream, pretend
from tests.quick import covering, pairwise, slow_but
from xfuser_cocodiff.engine.attention.reshard import start_seq_to_heads
from xfuser_cocodiff.engine.attention.ulysses import ulysses_attention
from xfuser_cocodiff.engine.comm import failure_detection
from xfuser_cocodiff.engine.comm.comm_stream import CommStream
from xfuser_cocodiff.engine.comm.head_group import HeadGroup
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.policy import PlanPolicy
from xfuser_cocodiff.engine.comm.stages import Stages
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.compression import codecs
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.codecs import EXACT, Codec
from xfuser_cocodiff.engine.compression.layer_codecs import CodecStats, LayerCodecs
from xfuser_cocodiff.engine.kernels import quantize
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology

pytestmark = pytest.mark.skipif(not HAS_BACKENDS, reason="needs a PyTorch that knows devices written in Python")

TOPOLOGY = Topology.parse("2x2", 4)
LAYERS = STEPS = 4
PLANS = ("flat", "hierarchical")
CODECS = {
    "bits": Codec(bits=2, predictor=codecs.ADAPTIVE),
    "drift": Codec(bits=2, share=0.5, predictor=0.5),
    "change": Codec(share=0.5, score="change"),
    "random": Codec(share=0.5, score="random"),
}
BOTH = (False, True)
THREADS = ((False, False), (True, False), (True, True))
"""Whether messages go through the host's memory, and whether the thread that sees to it comes late."""


@functools.cache
def device() -> torch.device:
    """As this process has it."""
    return pretend()


def make_tables() -> None:
    """What a process makes once, by copies that the host waits for."""
    scales, maxima = (torch.zeros(size, device=device()) for size in (256, 255))
    shifts = torch.zeros(8, dtype=torch.uint8, device=device())
    weights = {grid: torch.zeros(grid.per_byte, device=device()) for grid in quantize.GRIDS.values()}
    digits = {grid: torch.zeros(256, grid.per_byte, device=device()) for grid in quantize.GRIDS.values()}
    shares = {links: torch.zeros(links, dtype=torch.uint8, device=device()) for links in (1, 2, 3)}
    quantize.scale_table, quantize._weights = lambda _: scales, lambda grid, _: weights[grid]
    quantize._digits = lambda grid, _: digits[grid]
    quantize._maxima = lambda _: (maxima, scales, scales)
    codecs._shifts = lambda _: shifts
    codecs._on_all_links = lambda share, links, _: shares[links]


def mesh_of(plan: str, staged: bool, topology: Topology = TOPOLOGY, comm_stream: CommStream | None = None) -> Mesh:
    """A mesh among ranks that are not there either."""
    made = Plan.parse(plan, topology)
    groups = {stage: SimpleNamespace(size=lambda: topology.size, rank=lambda: 0) for stage in made.stages}
    stages = Stages(groups, device(), staged)
    return Mesh(topology, stages, PlanPolicy(lambda nbytes: made), comm_stream or CommStream(device(), staged))


ONCE = "node, at once"
SLOW = ["node", "all", ONCE]
"""Which axes are slow, and how coded exchanges go."""


def way_of(slow: str, staged: bool) -> tuple[Mesh, AxisPartition]:
    """A mesh, parted."""
    mesh = mesh_of("hierarchical", staged)
    if slow == "all":
        return mesh, AxisPartition((0, 1), (2, 2), 0, mesh, None)
    parts = [mesh_of("flat", staged, Topology.named(**{name: 2}), mesh.comm_stream) for name in ("node", "gpu")]
    return mesh, AxisPartition((0,), (2, 2), 0, *parts)


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_group: HeadGroup) -> torch.Tensor:
    return (query @ key.transpose(-1, -2)).softmax(-1) @ value


def run(mesh: Mesh, groups: int, v_first: bool, steps_of: Iterator[LayerCodecs | None]) -> None:
    """Layer after layer, as a transformer has them: each computes what the next one reads, and drops the rest."""
    hidden = torch.randn(2, 8, 8, 16, device=device())
    for layer_codecs in steps_of:
        value = hidden * 3
        sent = start_seq_to_heads([value], mesh, Label("v"), HeadGroup(0, groups), layer_codecs) if v_first else None
        query, key = hidden + 1, hidden - 1
        hidden = ulysses_attention(query, key, value, attend, mesh, groups, early_value=sent, layer_codecs=layer_codecs)


def exact(rank: int, plan: str) -> None:
    for groups, v_first, (staged, late) in itertools.product((1, 2), BOTH, THREADS):
        with Device(late) as made:
            run(mesh_of(plan, staged), groups, v_first, iter([None] * LAYERS))
        # Elsewhere it would only keep memory: the lane comes after all that the caller does with what it drops.
        assert staged or not made.recorded


@pytest.mark.parametrize("plan", slow_but(PLANS[1:], PLANS))
def test_exact_exchanges_are_in_order(plan: str) -> None:
    ranks.run(exact, 1, plan)


def encoded(rank: int, slow: str, codec: Codec, fused: bool) -> None:
    for v_first, (staged, late) in itertools.product(BOTH, THREADS):
        with Device(late) as made, made.by_triton() if fused else nullcontext():
            make_tables()
            mesh, partition = way_of(slow, staged)
            run(mesh, 1, v_first, steps_of(partition, codec, slow == ONCE))
        assert (made.recorded > 0) is staged


def steps_of(partition: AxisPartition, codec: Codec, single_stage: bool) -> Iterator[LayerCodecs]:
    """Of one layer, step by step."""
    link_states, stats = {}, CodecStats()
    for step in range(STEPS):
        codecs_of = dict.fromkeys("qkvo", codec if step else EXACT)
        yield LayerCodecs(partition, codecs_of, link_states, stats, step, single_stage=single_stage)
        if step == 1:  # a budget that turned out to be too small
            for link_state in link_states.values():
                link_state.to_int8(partition.fast.comm_stream if partition.fast and not single_stage else None)


@pytest.mark.parametrize(
    ("slow", "codec", "fused"),
    slow_but(
        [("node", "bits", True), ("all", "drift", True), ("node", "change", False), (ONCE, "drift", True)],
        covering(itertools.product(SLOW, CODECS, (True, False)), 2),  # in this order the quick ones are among them
    ),
)
def test_coded_exchanges_are_in_order(slow: str, codec: str, fused: bool) -> None:
    ranks.run(encoded, 1, slow, CODECS[codec], fused)


def take_times(rank: int, plan: str) -> list[str]:
    """Streams in which the times of exchanges are taken, with V first and heads in two groups."""
    seen = []

    class Event:
        device = device()

        def __init__(self, *_: object, **__: object) -> None:
            """Made for whichever stream is current when it is recorded."""

        def record(self) -> None:
            seen.append(stand_in.streams[-1].name)

    with Device() as stand_in, mock.patch.object(torch, "Event", Event):
        mesh = mesh_of(plan, False)
        mesh.traffic.timed = True
        run(mesh, 2, True, iter([None] * LAYERS))
    return seen


@pytest.mark.parametrize("plan", ["flat", "hierarchical"])
def test_the_time_of_an_exchange_is_all_of_it(plan: str) -> None:
    """From a stream that does nothing else: the caller's comes to its wait after what it computes meanwhile."""
    seen = ranks.run(take_times, 1, plan)[0]
    stages, exchanges = {"flat": 1, "hierarchical": 2}[plan], LAYERS * 5
    assert len(seen) == 2 * stages * exchanges
    assert CALLER not in seen


def expect(rank: int, staged: bool) -> int:
    """How many collectives somebody watches who knows whom to ask for, and holds none of their tensors."""
    expected = []

    class Event:
        def __init__(self, *_: object) -> None:
            """Of whichever device."""

        def record(self) -> None:
            """In whichever stream."""

        def query(self) -> bool:
            return False

    watching = mock.patch.multiple(
        failure_detection, set_deadline=lambda *given: expected.append(given), is_heartbeat_running=lambda: True
    )
    with Device(), watching, mock.patch.object(torch, "Event", Event):
        run(mesh_of("hierarchical", staged), 2, True, iter([None] * LAYERS))
    for is_done, _, label, _ in expected:
        assert isinstance(is_done.__self__, Event) and label in ("node", "gpu")
    return len(expected)


def test_exchanges_for_which_the_host_does_not_wait_are_watched() -> None:
    """Else the backend ends the process, and nobody says which rank was missing."""
    assert ranks.run(expect, 1, False) == [2 * LAYERS * 5]
    assert ranks.run(expect, 1, True) == [0]  # the lane's thread waits, and names it


def forget(what: str) -> None:
    """Leave out one of the things that keep order."""
    follow = Stream.wait_event
    forgotten: dict[str, tuple[type, str, Callable]] = {
        "what the comm stream needs": (
            Stream,
            "wait_event",
            lambda self, mark: CALLER in self.name and follow(self, mark),
        ),
        "what the caller needs": (Stream, "wait_event", lambda self, mark: CALLER in self.name or follow(self, mark)),
        "who else uses memory": (Device, "_record_stream", lambda *_: None),
        "copies to the host": (Stream, "synchronize", lambda self: None),
    }
    setattr(*forgotten[what])


def mistaken(rank: int, forgotten: str, staged: bool) -> str:
    forget(forgotten)
    with Device(late=staged), pytest.raises(DisorderError) as error:
        run(mesh_of("hierarchical", staged), 2, True, iter([None] * LAYERS))
    return str(error.value)


@pytest.mark.parametrize(
    ("forgotten", "staged", "found"),
    [
        ("what the comm stream needs", False, "an all-to-all on network .* written by the caller's stream"),
        ("what the caller needs", False, "of the caller's stream was dropped, and network 1 may use it"),
        ("who else uses memory", True, "of stream 1 was dropped, and the caller's stream may use it"),
        ("copies to the host", True, "an all-to-all on the host: pinned memory, written by stream 1"),
    ],
)
def test_disorder_is_found(forgotten: str, staged: bool, found: str) -> None:
    assert re.search(found, *ranks.run(mistaken, 1, forgotten, staged))


MOST = 12
"""Operations of an encoded layer beside its kernels: for small ones a launch is what takes longest."""
DRIFT_ADDS = 12
"""To choose tokens, to pack and unpack the choice, and to number them at both ends."""


def launches(rank: int, slow: str, v_first: bool, share: float) -> tuple[int, int]:
    """Of kernels, and of all else, in a layer of which every tensor is encoded."""
    codecs_of = {
        **dict.fromkeys("qkv", Codec(2, share, predictor=codecs.ADAPTIVE)),
        "o": Codec(1.6, predictor=codecs.ADAPTIVE),
    }
    with Device() as made, made.by_triton():
        make_tables()
        mesh, partition = way_of(slow, staged=False)
        query, key, value = (torch.randn(1, 8, 8, 16, device=device()) for _ in range(3))
        link_states: dict = {}
        for step in range(4):
            now = codecs_of if step else dict.fromkeys("qkvo", EXACT)
            layer_codecs = LayerCodecs(partition, now, link_states, CodecStats(), step, single_stage=slow == ONCE)
            made.launched.clear()
            sent = start_seq_to_heads([value], mesh, Label("v"), HeadGroup(), layer_codecs) if v_first else None
            ulysses_attention(
                query, key, value, lambda query, *_: query, mesh, early_value=sent, layer_codecs=layer_codecs
            )
        kernels = sum(count for name, count in made.launched.items() if name.endswith("_kernel"))
        return kernels, made.launched.total() - kernels


@pytest.mark.parametrize(("slow", "v_first", "share"), pairwise(itertools.product(SLOW, BOTH, [1.0, 0.5])))
def test_a_coded_layer_takes_few_launches(slow: str, v_first: bool, share: float) -> None:
    [(kernels, others)] = ranks.run(launches, 1, slow, v_first, share)
    # An encoder, what sums up for it, and a decoder for each tensor, and the scores of V.
    assert kernels == 12 + (share < 1)
    assert others <= MOST + DRIFT_ADDS * (share < 1)


WIDEST = 2**31 - 1, 65_535, 65_535
"""CUDA's limits to a grid."""
VIDEO = "HunyuanVideo, 129 frames"
TOKENS = {VIDEO: 33 * 45 * 80 + 256, "Wan, 81 frames": 21 * 45 * 80}
"""At 720p, where a token is of four frames and 16 x 16 pixels."""


def grids(rank: int, tokens: int, heads: int) -> list[tuple[str, tuple[int, ...]]]:
    """Of all kernels of a layer at every degree, with codecs and without."""
    found, codec = [], Codec(2, 0.5, predictor=0.5)
    for degree, batch in itertools.product((each for each in range(2, 25, 2) if heads % each == 0), (1, 2)):
        names = {"node": 2, "gpu": degree // 2} if degree > 2 else {"node": 2}
        topology = Topology.named(**names)
        with Device() as made, made.by_triton():
            make_tables()
            mesh = mesh_of("flat", False, topology)
            node = mesh_of("flat", False, Topology.named(node=2), mesh.comm_stream) if degree > 2 else mesh
            fast = mesh_of("flat", False, Topology.named(gpu=degree // 2), mesh.comm_stream) if degree > 2 else None
            partition = AxisPartition((0,), tuple(names.values()), 0, node, fast)
            query = torch.empty(batch, heads, -(-tokens // degree), 128, dtype=torch.bfloat16, device=device())
            link_states: dict = {}
            for codecs_of in (None, dict.fromkeys("qkvo", EXACT), dict.fromkeys("qkvo", codec)):
                layer_codecs = codecs_of and LayerCodecs(partition, codecs_of, link_states, CodecStats())
                ulysses_attention(query, query, query, lambda query, *_: query, mesh, layer_codecs=layer_codecs)
            found += made.grids
    return found


@pytest.mark.parametrize(("video", "heads"), slow_but([(VIDEO, 24)], itertools.product(TOKENS, [24, 40])))
def test_grids_of_long_videos_lie_within_cudas_limits(video: str, heads: int) -> None:
    [found] = ranks.run(grids, 1, TOKENS[video], heads)
    assert {name for name, _ in found} == {f"_{name}_kernel" for name in ("scores", "encode", "sums", "decode")}
    for name, grid in found:
        assert all(0 < size <= most for size, most in zip(grid, WIDEST, strict=False)), (name, grid)


def waits(rank: int, what: str) -> None:
    questions: dict[str, Callable[[torch.Tensor], object]] = {
        "a value": lambda values: bool(values.any()),
        "a copy": lambda values: values.to("cpu"),
    }
    with Device(), pytest.raises(DisorderError, match=f"the host waits for {what}"):
        questions[what](torch.zeros(3, device=device()))


@pytest.mark.parametrize("what", ["a value", "a copy"])
def test_waiting_is_found(what: str) -> None:
    ranks.run(waits, 1, what)
