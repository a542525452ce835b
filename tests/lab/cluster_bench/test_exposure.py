"""What computation waits for, in a block made by hand whose times are known, and in the command that prints it."""

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from tests.lab.cluster_bench.programs import one_block
from xfuser_cocodiff import cli
from xfuser_cocodiff.engine.comm.comm_stream import CommStream
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.topology.devices import CPU
from xfuser_cocodiff.engine.topology.link_profile import AxisLink
from xfuser_cocodiff.lab.accelerator.accelerators import Accelerator
from xfuser_cocodiff.lab.accelerator.clock import Clock
from xfuser_cocodiff.lab.accelerator.program import Counts, GroupPattern, Program, RecordedCollective
from xfuser_cocodiff.lab.accelerator.time_line import Instant
from xfuser_cocodiff.lab.cluster_bench import exposure
from xfuser_cocodiff.lab.cluster_bench.cell import Cell
from xfuser_cocodiff.lab.cluster_bench.cell_rows import RecordedVariant
from xfuser_cocodiff.lab.cluster_bench.exposure import Exposure
from xfuser_cocodiff.lab.cluster_bench.recording import RecordedSplit, Recording
from xfuser_cocodiff.lab.cluster_bench.sent_tensors import name_by_label, name_by_order
from xfuser_cocodiff.lab.cluster_bench.variants import Variant
from xfuser_cocodiff.lab.emulation import forked_ranks
from xfuser_cocodiff.lab.simulation.machines import DGX_H100
from xfuser_cocodiff.xdit.settings.ring_placement import UlyssesRingSplit

RANKS, BLOCKS, CALLS = 8, 40, 2
MS, KERNELS, HOST_WAIT = 1e-3, 9e-3, 0.5e-3
DEADLINE = 300
"""Seconds after which a test gives up: a guard against hangs, not a bound on speed."""


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
    return exposure.exposures(recorded, "step")


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
    clock, start = Clock(Accelerator("round", 1e9, 1e9, 1e9, 1e9, 0.0, 0.0, 0.0)), CommStream.start

    def work() -> list[str]:
        return [clock.start_collective(range(2), (1, 1), (1, 1)).tensors for _ in range(2)]

    with name_by_label(clock):
        for tensors in ("qk", "o"):
            assert CommStream.on(CPU).start(Label(tensors, "layer"), work).wait() == [tensors] * 2
    assert CommStream.start is start


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


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the command run in this process on steps made by hand; return its options."""

    def record_split(used: Cell, split: Any, variants: Any) -> RecordedSplit:
        step = one_block(RANKS, 100_000, 0.001, 0.001)
        return RecordedSplit({each.name: Recording({"step": step}, {"step": 1.0}) for each in variants}, {"block": 40})

    monkeypatch.setattr(exposure, "record_split", record_split)
    monkeypatch.setattr(exposure.transformer_wrappers, "preload", lambda name: None)
    monkeypatch.setattr(forked_ranks, "prepare_environment", lambda: None)
    monkeypatch.setattr(cli.bench.bench_cluster, "_silence_libraries", lambda: None)
    options = ["bench", "cluster", "--machine", "dgx-h100", "--nodes", "1", "--model", "wan", "--resolution", "480"]
    options += ["--layers", "1"]  # of the step made by hand
    return [*options, "--exposure"]


def test_the_command_prints_a_row_per_kind_of_block(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(command) == 0
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert [line[:4] for line in lines if "block" in line] == [["stock,", "8", "x", "1"], ["exact,", "8", "x", "1"]]
    assert printed.count("160.0") >= 4  # computation of 2 x 40 blocks of 2 ms, in two rows of two variants
    assert "hide O" in printed


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--modes", "exact,balanced"], "--modes 'balanced' is not valid with --exposure"),
        (["--modes", "fp4"], "--modes 'fp4' is not valid with --exposure"),
        (["--json", "record.json"], "--json, --plot and --quality are not valid"),
    ],
)
def test_options_that_do_not_apply_are_errors(
    command: list[str], capsys: pytest.CaptureFixture[str], options: list[str], error: str
) -> None:
    assert cli.main([*command, *options]) == 2
    assert error in capsys.readouterr().err


BYTES_BY_TENSORS = """
from xfuser_cocodiff.lab.emulation import forked_ranks
forked_ranks.prepare_environment()
import collections, json
from xfuser_cocodiff.lab.cluster_bench import cell, recording, variants
from xfuser_cocodiff.lab.simulation.machines import MACHINES
from xfuser_cocodiff.lab.launching import transformer_wrappers
used = cell.Cell(MACHINES["dgx-h100"], 1, "flux.1-dev", 384)
transformer_wrappers.preload(used.model)
asked = variants.parse(used, ["exact/flat@v_first=on"])
recorded = recording.record_split(used, asked[0].split, asked)
sent = {}
for name, each in recorded.recordings.items():
    sent[name] = collections.Counter()
    for collective in each.programs["step"].collectives:
        sent[name][collective.tensors] += sum(collective.sent)
print(json.dumps(sent))
"""


@pytest.mark.slow
def test_recorded_collectives_send_each_tensor_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BYTES_BY_TENSORS], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert done.returncode == 0, done.stderr
    stock, exact = json.loads(done.stdout.splitlines()[-1]).values()
    output = 2 * (512 + 24 * 24) // 8 * 3072 * 2  # two blocks; text and image tokens of a rank in bf16
    assert stock == {"qkv": 3 * output, "o": output, "": stock[""]}  # the model's own output is gathered
    assert exact == {"v": output, "qk": 2 * output, "o": output, "": stock[""]}
