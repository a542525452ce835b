"""Codecs in compiled graphs: the same layers, steps, bytes and PSNR as in eager mode, and independent runs."""

from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import bare_runtime
from tests import ranks
from tests.quick import slow_but
from tests.xdit.attention.test_overlap import inputs_of, start, use_config
from tests.xdit.session.test_session import GATHERED, config_of
from tests.xdit.test_approximation import STEPS, LossyRun, decibels
from xfuser_cocodiff.engine.attention.ulysses import UlyssesAttention
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.compression.rate_control import LEVELS
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.session.session import Session

pytestmark = pytest.mark.usefixtures("hub")


def compile_transformer(run: LossyRun, how: str) -> None:
    """Compile as xDiT's runners do: the whole transformer, in place, or block by block."""
    pipe = run.runner.model.pipe
    if how == "whole":
        pipe.transformer = torch.compile(pipe.transformer, backend="aot_eager")
    elif how == "in place":
        pipe.transformer.compile(backend="aot_eager")
    else:
        for blocks in (each for each in pipe.transformer.children() if isinstance(each, torch.nn.ModuleList)):
            for index, block in enumerate(blocks):
                blocks[index] = torch.compile(block, backend="aot_eager")


def figures(run: LossyRun) -> list[tuple]:
    """Return the bytes and the errors of all layers for each step."""
    return [(report.sent_bytes, report.exact_bytes, report.errors) for report in run.runtime.reports]


def run_eager_and_compiled(rank: int, world_size: int, model: str, how: str) -> dict[str, Any]:
    from torch._dynamo.utils import counters

    run = LossyRun(rank, world_size, model)
    stock = run()
    run.use_mode("balanced", TOPOLOGIES[world_size])
    eager, expected = run(), figures(run)
    compile_transformer(run, how)
    latents, found = run(), figures(run)
    graphs = counters["stats"]["unique_graphs"]
    run(prompt="two cups")
    again = run()
    return {
        "psnr": (decibels(eager, stock), decibels(latents, stock)),
        "figures": (expected, found),
        "graphs": (graphs, counters["stats"]["unique_graphs"]),
        "is_reproducible": torch.equal(latents, again),
    }


def change_bits(rank: int) -> tuple[list[tuple], list[tuple], tuple[int, int]]:
    """Return figures of eager and compiled runs whose bits change in each step, and graphs before and after."""
    from torch._dynamo.utils import counters

    run = LossyRun(rank, 2, "FLUX.1-dev")
    run.use_mode("balanced", TOPOLOGIES[2])

    def change() -> list[tuple]:
        run.runtime.fixed_bits = [LEVELS[step % len(LEVELS)] for step in range(STEPS)]
        run()
        return figures(run)

    eager = change()
    compile_transformer(run, "in place")
    run()
    graphs = counters["stats"]["unique_graphs"]
    return eager, change(), (graphs, counters["stats"]["unique_graphs"])


@pytest.mark.slow  # the runtime looks up codecs in each call, in graphs too
def test_bits_change_without_new_graphs() -> None:
    for eager, compiled, graphs in ranks.run(change_bits, 2):
        for expected, step in zip(eager, compiled, strict=True):
            assert step[:2] == pytest.approx(expected[:2], rel=2e-2)
            assert step[2] == pytest.approx(expected[2], rel=0.1, abs=1e-3)
        assert len({step[0] for step in compiled}) > 2 and graphs[0] == graphs[1]


class TwoLayers:
    """Runs of a double and a single block on one rank, which record the messages of gathered K and V.

    Args:
        rank: number of the rank.
    """

    def __init__(self, rank: int, depth: int = 2) -> None:
        self.group, self.transformer, step = start(rank, depth=depth)
        self._given, self.gathered = inputs_of(self.transformer, step), []
        self.gathering: list[str] = []
        """Layers of these messages."""

    @torch.no_grad()
    def run(self, session: Session) -> list[torch.Tensor]:
        """Return the outputs of a declared run."""
        results, gathered = [], UlyssesAttention._gathered
        self.gathered.clear()
        self.gathering.clear()

        def noting(call: UlyssesAttention, tensors: list, partition: Any, label: Label, *codecs: Any) -> Any:
            self.gathered.append(label.tensors)
            self.gathering.append(label.layer)
            return gathered(call, tensors, partition, label, *codecs)

        with mock.patch.object(UlyssesAttention, "_gathered", noting):
            session.begin_run(STEPS)
            for number in range(STEPS):
                hidden_states = self._given["hidden_states"] * (1 + 0.2 * number)
                results.append(self.transformer(**self._given | {"hidden_states": hidden_states})[0])
                session.end_step()
        return results

    def coded(self, session: Session) -> tuple[list[torch.Tensor], list[tuple]]:
        """Return the outputs of a declared run, and bytes and errors by step."""
        results, reports = self.run(session), session.runtime.reports
        return results, [(report.sent_bytes, report.exact_bytes, report.errors) for report in reports]


def run_two_layers(rank: int, plan: Plan) -> tuple[list[tuple], list[tuple], bool, tuple[list[str], list[str]]]:
    """Return figures, eager and compiled, whether compiled runs are reproducible, and the gathers of each."""
    layers = TwoLayers(rank)
    session = use_config(layers.group, config_of("balanced", plan=plan))
    layers.run(session)  # in which layers are detected
    _, eager = layers.coded(session)
    gathers = list(layers.gathered)
    layers.transformer.compile(backend="aot_eager")
    (first, compiled), (second, _) = layers.coded(session), layers.coded(session)
    return eager, compiled, all(map(torch.equal, first, second)), (gathers, list(layers.gathered))


@pytest.mark.parametrize("plan", slow_but([GATHERED], [Plan.flat(GATHERED.topology), GATHERED]), ids=str)
def test_two_compiled_layers_equal_eager_mode(plan: Plan) -> None:
    for eager, compiled, is_reproducible, gathers in ranks.run(run_two_layers, 2, plan):
        eager_messages, messages = (["v", "qk"], ["qkv"]) if plan.gathers_kv else ([], [])
        assert gathers == (2 * STEPS * eager_messages, 2 * STEPS * messages)
        assert len(eager) == len(compiled) == STEPS and is_reproducible
        assert max(sent / exact for sent, exact, _ in compiled[1:]) < 0.5
        for expected, step in zip(eager, compiled, strict=True):
            assert step[:2] == pytest.approx(expected[:2], rel=2e-2)
            assert step[2] == pytest.approx(expected[2], rel=0.1, abs=1e-3)


def run_compiled_exactly(rank: int) -> tuple[bool, list[str]]:
    """Return whether a compiled transformer gives stock's bits with a plan that gathers, and the gathers."""
    layers = TwoLayers(rank)
    stock = Session()
    bare_runtime.use_session(stock)
    layers.transformer.compile(backend="aot_eager")
    expected = layers.run(stock)
    torch.compiler.reset()
    session = use_config(layers.group, config_of("exact", plan=GATHERED))
    found = layers.run(session)
    return all(map(torch.equal, found, expected)), layers.gathered


@pytest.mark.slow  # test_two_compiled_layers_equal_eager_mode is quick
def test_exact_mode_keeps_heads_in_graphs() -> None:
    """Graphs are traced before a check could compare bits."""
    for is_stocks, gathered in ranks.run(run_compiled_exactly, 2):
        assert is_stocks and not gathered


def graphs_of_first_run(rank: int, plan: str) -> tuple[int, int, tuple[str, ...], float]:
    """Return graphs, graph breaks, gathering layers and PSNR of a pipeline that is compiled before its first call."""
    from torch._dynamo.utils import counters

    run = LossyRun(rank, 4, "FLUX.1-dev")
    stock = run()
    run.use_mode("balanced", "2x2", plan=Plan.parse(plan, Topology.parse("2x2")))
    compile_transformer(run, "whole")
    counters.clear()
    latents, graphs = run(), counters["stats"]["unique_graphs"]
    gathering = run.runtime.reports[-1].gathered_layers
    return graphs, sum(counters["graph_break"].values()), gathering, decibels(latents, stock)


@pytest.mark.slow
def test_gathers_break_no_graph_that_is_compiled_first() -> None:
    plans = "hierarchical", "hierarchical:gpu,node=kv"
    for by_heads, gathered in zip(*(ranks.run(graphs_of_first_run, 4, plan) for plan in plans), strict=True):
        assert gathered[:2] == by_heads[:2]
        assert len(gathered[2]) == 6 and not by_heads[2]  # all blocks
        assert min(gathered[3], by_heads[3]) > 30


TOPOLOGIES = {2: "node=2", 4: "2x2"}
CASES = [
    ("FLUX.1-dev", "whole", 2),
    ("FLUX.2-dev", "blocks", 4),
    ("SD3.5", "in place", 4),
    ("Qwen-Image", "whole", 4),
]


@pytest.mark.slow  # two layers are the quick test
@pytest.mark.parametrize(("model", "how", "world_size"), CASES)
def test_compiled_pipelines_equal_eager_mode(model: str, how: str, world_size: int) -> None:
    for found in ranks.run(run_eager_and_compiled, world_size, world_size, model, how):
        eager, compiled = found["psnr"]
        assert compiled == pytest.approx(eager, abs=0.5)
        for expected, step in zip(*found["figures"], strict=True):
            # If V-First was faster, V is a message with a flag of its own.
            assert step[:2] == pytest.approx(expected[:2], rel=2e-2)
            assert step[2] == pytest.approx(expected[2], rel=0.1, abs=1e-3)
        assert found["is_reproducible"]
        assert (
            model == "Qwen-Image" or found["graphs"][0] == found["graphs"][1]
        )  # whose prompts have another number of tokens


def run_with_budget(rank: int) -> list[list[int]]:
    """Return the bytes of references in each step: eager and compiled, with a budget."""
    run = LossyRun(rank, 2, "FLUX.1-dev")
    run.use_mode("balanced", "node=2")
    run()
    full_bytes = run.runtime.reports[-1].reference_bytes
    budget = full_bytes // 6  # a half is without predictions: a third of the layers has references
    found = []
    for is_compiled in (False, True):
        if is_compiled:
            compile_transformer(run, "whole")
        run.use_mode("balanced", "node=2", memory_budget=budget)
        run()
        found.append([report.reference_bytes for report in run.runtime.reports])
        assert 0 < max(found[-1]) <= budget
    return found


@pytest.mark.slow  # eager mode has a quick test
def test_compiled_graphs_keep_the_memory_budget() -> None:
    for eager, compiled in ranks.run(run_with_budget, 2):
        assert compiled == eager


def run_with_nan(rank: int, plan: Plan) -> tuple[list[bool], bool]:
    """Return whether each step of a run with NaN at its third was repeated, and whether the next run is sound."""
    from xfuser_cocodiff.engine.attention import reshard, ulysses

    run = LossyRun(rank, 2, "FLUX.1-dev")
    run.use_mode("balanced", "node=2", plan=plan)
    compile_transformer(run, "whole")
    healthy = run()
    sender, name = (ulysses, "gather") if plan.gathers_kv else (reshard.coded_all_to_all, "start")
    start, runtime = getattr(sender, name), run.runtime

    def with_nan(tensors: list, *given: Any) -> Any:
        if runtime.clock.step == 2 and rank == 0:
            tensors[0][(0,) * tensors[0].ndim] = float("nan")
        return start(tensors, *given)

    with mock.patch.object(sender, name, with_nan):
        run()
    return [report.repeated > 0 for report in runtime.reports], torch.equal(run(), healthy)


@pytest.mark.slow  # eager mode has a quick test
@pytest.mark.parametrize("plan", [Plan.flat(GATHERED.topology), GATHERED], ids=str)
def test_not_finite_values_are_repeated_and_affect_no_other_run(plan: Plan) -> None:
    for repeated, is_healthy in ranks.run(run_with_nan, 2, plan):
        assert repeated == [step >= 2 for step in range(len(repeated))]
        assert is_healthy
