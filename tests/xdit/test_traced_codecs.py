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
from tests.xdit.test_approximation import STEPS, LossyRun
from xfuser_cocodiff.engine.attention.ulysses import UlyssesAttention
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.xdit.session.session import Session


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
