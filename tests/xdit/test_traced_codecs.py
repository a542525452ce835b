"""Codecs in compiled graphs: the same layers, steps and bytes as in eager mode, as near to stock, and no run knows of
another."""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.xdit.attention.test_overlap import inputs_of, start, use_config
from tests.xdit.session.test_session import config_of
from tests.xdit.test_approximation import STEPS, Approximating, decibels

pytestmark = pytest.mark.usefixtures("hub")


def compile_transformer(run: Approximating, how: str) -> None:
    """As xDiT's runners do it: as a whole, in place, or block by block."""
    pipe = run.runner.model.pipe
    if how == "whole":
        pipe.transformer = torch.compile(pipe.transformer, backend="aot_eager")
    elif how == "in place":
        pipe.transformer.compile(backend="aot_eager")
    else:
        for blocks in (each for each in pipe.transformer.children() if isinstance(each, torch.nn.ModuleList)):
            for index, block in enumerate(blocks):
                blocks[index] = torch.compile(block, backend="aot_eager")


def figures(run: Approximating) -> list[tuple]:
    """Of each step: bytes, and layers with their errors."""
    return [(report.sent_bytes, report.exact_bytes, report.errors) for report in run.runtime.reports]


def eager_and_compiled(rank: int, world_size: int, model: str, how: str) -> dict[str, Any]:
    from torch._dynamo.utils import counters

    run = Approximating(rank, world_size, model)
    stock = run()
    run.use_mode("balanced", TOPOLOGIES[world_size])
    eager, expected = run(), figures(run)
    compile_transformer(run, how)
    latents, found = run(), figures(run)
    graphs = counters["stats"]["unique_graphs"]
    run(prompt="two cups")
    again = run()
    return {
        "near": (decibels(eager, stock), decibels(latents, stock)),
        "alike": (expected, found),
        "graphs": (graphs, counters["stats"]["unique_graphs"]),
        "again": torch.equal(latents, again),
    }


def two_layers(rank: int) -> tuple[list[tuple], list[tuple], bool]:
    """Figures of a coded run of a double and a single block, eager and compiled, and whether a second compiled run is
    the first one again."""
    group, transformer, step = start(rank, depth=2)
    given, session = inputs_of(transformer, step), use_config(group, config_of("balanced"))

    def run() -> tuple[list[torch.Tensor], list[tuple]]:
        results = []
        session.runs.begin(STEPS)
        for number in range(STEPS):
            results.append(transformer(**given | {"hidden_states": given["hidden_states"] * (1 + 0.2 * number)})[0])
            session.runs.end_step()
        reports = session.runtime.reports
        return results, [(report.sent_bytes, report.exact_bytes, report.errors) for report in reports]

    with torch.no_grad():
        run()  # in which layers become known
        _, eager = run()
        transformer.compile(backend="aot_eager")
        (first, compiled), (second, _) = run(), run()
    return eager, compiled, all(map(torch.equal, first, second))


def test_a_graph_encodes_what_eager_mode_does_in_two_layers() -> None:
    for eager, compiled, is_same_again in ranks.run(two_layers, 2):
        assert len(eager) == len(compiled) == STEPS and is_same_again
        assert max(sent / exact for sent, exact, _ in compiled[1:]) < 0.5
        for expected, step in zip(eager, compiled, strict=True):
            assert step[:2] == pytest.approx(expected[:2], rel=1e-2)
            assert step[2] == pytest.approx(expected[2], rel=0.1, abs=1e-3)


TOPOLOGIES = {2: "node=2", 4: "2x2"}
CASES = [
    ("FLUX.1-dev", "whole", 2),
    ("FLUX.2-dev", "blocks", 4),
    ("SD3.5", "in place", 4),
    ("Qwen-Image", "whole", 4),
]


@pytest.mark.slow  # two layers of a transformer alone are quick
@pytest.mark.parametrize(("model", "how", "world_size"), CASES)
def test_a_graph_encodes_what_eager_mode_does(model: str, how: str, world_size: int) -> None:
    for found in ranks.run(eager_and_compiled, world_size, world_size, model, how):
        eager, compiled = found["near"]
        assert compiled == pytest.approx(eager, abs=0.5)
        for expected, step in zip(*found["alike"], strict=True):
            # V goes alone where that was faster, with a flag of its own.
            assert step[:2] == pytest.approx(expected[:2], rel=1e-2)
            assert step[2] == pytest.approx(expected[2], rel=0.1, abs=1e-3)
        assert found["again"]
        assert model == "Qwen-Image" or found["graphs"][0] == found["graphs"][1]  # which is given other tokens


def keep_bounds(rank: int) -> list[list[tuple[int, bool]]]:
    """Layers that travel exactly at each step, and whether all do: eager and compiled, with little room for references,
    and with an error that asks for exact steps."""
    run = Approximating(rank, 2, "FLUX.1-dev")
    run.use_mode("balanced", "node=2")
    run()
    held = run.runtime.reports[-1].reference_bytes
    room = held // 6  # less than all take in 8 bits, a quarter of fp32
    error = torch.tensor(0.5 * max(report.error for report in run.runtime.reports))
    dist.all_reduce(error, dist.ReduceOp.MAX)
    found = []
    for is_compiled in (False, True):
        if is_compiled:
            compile_transformer(run, "whole")
        for bound in ({"memory_budget": room}, {"max_error": error.item()}):
            run.use_mode("balanced", "node=2", **bound)
            run()
            reports = run.runtime.reports
            assert max(report.reference_bytes for report in reports) <= bound.get("memory_budget", held)
            found.append([(report.exact_layers, report.was_keyframe) for report in reports])
    return found


@pytest.mark.slow  # eager mode has such a test for each bound
def test_a_graph_keeps_the_bounds_of_room_and_error() -> None:
    for eager_room, eager_error, room, error in ranks.run(keep_bounds, 2):
        assert room == eager_room and error == eager_error
        assert 0 < room[-1][0] < 6  # of the blocks
        assert sum(was_keyframe for _, was_keyframe in error) > 1 + sum(was_keyframe for _, was_keyframe in room)


def poison(rank: int) -> tuple[list[bool], bool]:
    """Whether exchanges were repeated, in each step of a run that goes wrong at its third, and whether the next run is
    that of a healthy process."""
    from xfuser_cocodiff.engine.attention import reshard

    run = Approximating(rank, 2, "FLUX.1-dev")
    run.use_mode("balanced", "node=2")
    compile_transformer(run, "whole")
    healthy = run()
    send, runtime = reshard.coded_all_to_all.start, run.runtime

    def poisoned(pieces: list, *given: Any) -> Any:
        if runtime.step == 2 and rank == 0:
            pieces[0][(0,) * pieces[0].ndim] = float("nan")
        return send(pieces, *given)

    with mock.patch.object(reshard.coded_all_to_all, "start", poisoned):
        run()
    return [report.repeated > 0 for report in runtime.reports], torch.equal(run(), healthy)


@pytest.mark.slow  # and for values that are not finite
def test_what_is_not_finite_goes_exactly_and_reaches_no_other_run() -> None:
    for repeated, is_healthy in ranks.run(poison, 2):
        assert repeated == [step >= 2 for step in range(len(repeated))]
        assert is_healthy
