"""What computation waits for, in a block made by hand whose times are known."""

from dataclasses import replace

import pytest

from benchmarks.accelerator.clock import Clock
from benchmarks.accelerator.program import Counts, GroupPattern, Program, RecordedCollective
from benchmarks.accelerator.time_line import Instant
from benchmarks.cluster import exposure
from benchmarks.cluster.cell import Cell
from benchmarks.cluster.exposure import Exposure
from benchmarks.cluster.recording import Recording, name_by_label, name_by_order
from benchmarks.cluster.rows import RecordedVariant
from benchmarks.cluster.variants import Variant
from xfuser_cocodiff.engine.comm.comm_stream import CommStream
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.topology.devices import CPU
from xfuser_cocodiff.engine.topology.link_profile import AxisLink
from xfuser_cocodiff.lab.accelerator.accelerators import Accelerator
from xfuser_cocodiff.lab.simulation.machines import DGX_H100
from xfuser_cocodiff.xdit.settings.ring_placement import UlyssesRingSplit

RANKS, BLOCKS, CALLS = 8, 40, 2
MS, KERNELS, HOST_WAIT = 1e-3, 9e-3, 0.5e-3


def cell(bytes_per_second: float = 7e9, blocks: int = 1) -> Cell:
    """Return a cell whose ranks send a message of 1 MB to each of the 7 others in 1 ms, and without latency."""
    links = (AxisLink("node", 0.0, bytes_per_second), AxisLink("gpu", 0.0, bytes_per_second))
    machine = replace(DGX_H100, links=links, launch_seconds=0.0)
    return Cell(machine, 1, "wan2.1-14b", 480, blocks=blocks)  # two calls of 40 equal blocks


def message(tensors: str, milliseconds: float, start: Instant) -> RecordedCollective:
    """Return an all-to-all that takes some milliseconds."""
    sizes = (int(1e6 * milliseconds),) * RANKS
    return RecordedCollective(GroupPattern.of(range(RANKS)), start, sizes, sizes, tensors=tensors)


def v_first(*v_milliseconds: float) -> Program:
    """Return a step of blocks that send V in some milliseconds each.

    V is sent after 1 ms, Q and K (6 ms) after 4 ms, attention takes 3 ms, O is sent (2 ms), and after another 2 ms the
    device waits 0.5 ms for the host.
    """
    program = Program()
    for index, milliseconds in enumerate(v_milliseconds):
        _mark(program, f"block {index} begin")
        value = message("v", milliseconds, program.end.after(1 * MS))
        projected = program.end.after(4 * MS)
        query = message("qk", 6, projected)
        attended = projected.after_collective(value).after_collective(query).after(3 * MS)
        output = message("o", 2, attended)
        program.end = attended.after_collective(output).after(2 * MS + HOST_WAIT)
        program.collectives += [value, query, output]
        program.kernel_seconds += KERNELS
        _mark(program, f"block {index} end")
    return program


def _mark(program: Program, name: str) -> None:
    program.marks[name], program.counts[name] = program.end, program.counts_so_far()


def rows(program: Program, used: Cell) -> list[Exposure]:
    variant = Variant("exact", UlyssesRingSplit(RANKS, 1), mode="exact")
    recorded = RecordedVariant(used, variant, Recording({"step": program}, {"step": 1.0}), {"block": BLOCKS})
    return exposure.exposures(recorded)


@pytest.mark.parametrize(
    ("v_milliseconds", "exposed", "savings"),
    [
        ([2], 6 + 2, {"V alone": 0, "Q, K, V": 6, "O": 2}),  # V has arrived when Q and K start
        ([5], 8 + 2, {"V alone": 2, "Q, K, V": 6, "O": 2}),  # V delays Q and K by 2 ms
        ([2, 5], 10 - 2 / 40, {"V alone": 2 - 2 / 40, "Q, K, V": 6, "O": 2}),  # the second stands for 39 of 40 blocks
    ],
)
def test_exposed_time_is_split_by_what_hiding_a_tensor_saves(
    v_milliseconds: list[float], exposed: float, savings: dict[str, float]
) -> None:
    by_kind, step = rows(v_first(*v_milliseconds), cell(blocks=len(v_milliseconds)))
    last = BLOCKS - len(v_milliseconds) + 1
    sent = (sum(v_milliseconds[:-1]) + last * v_milliseconds[-1]) / BLOCKS + 6 + 2
    assert (by_kind.blocks, step.blocks) == ("40 block", "step")
    for row in (by_kind, step):  # a step has nothing but its blocks
        each = 1 / (CALLS * BLOCKS)
        assert row.kernel_seconds * each == pytest.approx(KERNELS)
        assert row.host_wait_seconds * each == pytest.approx(HOST_WAIT)
        assert row.exposed_seconds * each == pytest.approx(exposed * MS)
        assert {name: saved * each for name, saved in row.savings.items()} == pytest.approx(
            {name: saved * MS for name, saved in savings.items()}, abs=1e-9
        )
        assert row.link_seconds["gpu"] * each == pytest.approx(sent * MS)
        assert row.bound_seconds * each == pytest.approx(max(KERNELS, sent * MS))
        assert row.seconds * each == pytest.approx(KERNELS + HOST_WAIT + exposed * MS)


def test_nothing_is_exposed_on_links_that_take_no_time() -> None:
    for row in rows(v_first(5), cell(bytes_per_second=1e18)):
        assert row.exposed_seconds == pytest.approx(0, abs=1e-6)
        assert all(saved == pytest.approx(0, abs=1e-6) for saved in row.savings.values())


def test_stages_of_the_plugin_send_the_tensors_of_their_label() -> None:
    clock = Clock(Accelerator("round", 1e9, 1e9, 1e9, 1e9, 0.0, 0.0, 0.0))

    def work() -> list[str]:
        return [clock.start_collective(range(2), (1, 1), (1, 1)).tensors for _ in range(2)]

    with name_by_label(clock):
        stream = CommStream.on(CPU)
        assert stream.start(Label("qk", "layer"), work).wait() == ["qk"] * 2
        assert stream.start_collective(Label("o", "layer"), lambda: work).wait() == ["o"] * 2
    assert CommStream.on(CPU).start(Label("v", "layer"), work).wait() == ["o"] * 2


@pytest.mark.parametrize(
    ("groups", "tensors"),
    [
        ("UU", "qkv o"),
        ("UUUU", "qkv qkv qkv o"),
        ("URRU", "qkv kv kv o"),
        ("RR", "kv kv"),
    ],
)
def test_messages_of_stock_are_told_by_their_order(groups: str, tensors: str) -> None:
    ranks = {"U": GroupPattern.of([0, 1]), "R": GroupPattern.of([0, 2])}
    block = [RecordedCollective(ranks[each], Instant(), (1, 1), (1, 1)) for each in groups]
    gathered = RecordedCollective(ranks["U"], Instant(), (1, 1), (1, 1))
    edges = {"block 0 begin": Counts(0.0, 0.0, 0, 0), "block 0 end": Counts(0.0, 0.0, 0, len(block))}
    program = Program([*block, gathered], counts=edges)
    name_by_order(program, has_ulysses="U" in groups)
    assert [each.tensors for each in program.collectives] == [*tensors.split(), ""]
