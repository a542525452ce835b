"""Codecs in compiled graphs: the same layers, steps, bytes and errors as in eager mode, and independent runs."""

from typing import Any
from unittest import mock

import pytest
import torch

from tests import ranks
from tests.xdit.attention.test_overlap import inputs_of, start, use_config
from tests.xdit.session.test_session import GATHERED, config_of
from tests.xdit.test_approximation import STEPS
from xfuser_cocodiff.engine.attention.ulysses import UlyssesAttention
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.compression.runtime import CodecRuntime
from xfuser_cocodiff.xdit.session.session import Session


def figures(runtime: CodecRuntime) -> list[tuple]:
    """Return the bytes and the errors of all layers for each step."""
    return [(report.sent_bytes, report.exact_bytes, report.errors) for report in runtime.reports]


class TwoLayers:
    """Runs of a double and a single block on one rank, which record the messages of gathered K and V.

    Args:
        rank: number of the rank.
    """

    def __init__(self, rank: int) -> None:
        self.group, self.transformer, step = start(rank, depth=2, text_tokens=5)  # which every rank has
        self._given, self.gathered = inputs_of(self.transformer, step), []

    @torch.no_grad()
    def run(self, session: Session) -> list[torch.Tensor]:
        """Return the outputs of a declared run."""
        results, gathered = [], UlyssesAttention._gathered
        self.gathered.clear()

        def noting(call: UlyssesAttention, tensors: list, partition: Any, label: Label, *codecs: Any) -> Any:
            self.gathered.append(label.tensors)
            return gathered(call, tensors, partition, label, *codecs)

        with mock.patch.object(UlyssesAttention, "_gathered", noting):
            session.begin_run(STEPS)
            for number in range(STEPS):
                hidden_states = self._given["hidden_states"] * (1 + 0.2 * number)
                results.append(self.transformer(**self._given | {"hidden_states": hidden_states})[0])
                session.end_step()
        return results


def run_two_layers(rank: int) -> tuple[list[tuple], list[tuple], bool, tuple[list[str], list[str]]]:
    """Return figures, eager and compiled, whether compiled runs are reproducible, and the gathers of each."""
    layers = TwoLayers(rank)
    session = use_config(layers.group, config_of("balanced", plan=GATHERED))
    layers.run(session)  # in which layers are detected
    layers.run(session)
    eager, gathers = figures(session.runtime), list(layers.gathered)
    layers.transformer.compile(backend="aot_eager")
    first, second = layers.run(session), layers.run(session)
    return eager, figures(session.runtime), all(map(torch.equal, first, second)), (gathers, list(layers.gathered))


def test_two_compiled_layers_equal_eager_mode() -> None:
    for eager, compiled, is_reproducible, gathers in ranks.run(run_two_layers, 2):
        assert gathers == (2 * STEPS * ["v", "qk"], 2 * STEPS * ["qkv"])
        assert len(eager) == len(compiled) == STEPS and is_reproducible
        assert max(sent / exact for sent, exact, _ in compiled[1:]) < 0.5
        for expected, step in zip(eager, compiled, strict=True):
            assert step[:2] == pytest.approx(expected[:2], rel=5e-2)  # V is in a message of its own, or not
            assert step[2] == pytest.approx(expected[2], rel=0.1, abs=1e-3)
