"""Where stock is fastest, its own functions run in the layers, and no code of the plugin does."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch

import xfuser_cocodiff
from tests import ranks
from tests.xdit.attention.test_overlap import inputs_of, start, use
from xfuser_cocodiff.engine.comm.policy import PlanPolicy
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.session.session import Session

FOLDERS = tuple(str(Path(xfuser_cocodiff.__file__).parent / "xdit" / name) for name in ("attention", "layers"))
KERNELS = "attention_kernels.py"
"""Of CPUs, in stock too."""
FLAT = Plan.flat(Topology.flat(2))
NO_MLP = mock.patch("xfuser_cocodiff.xdit.layers.layer.has_parallel_mlp", lambda block: False)


class Model:
    """A FLUX.1 on one rank, whose planner expects no gain of anything.

    Args:
        rank: number of the rank.
        depth: number of blocks.
    """

    def __init__(self, rank: int, depth: int) -> None:
        self.group, self.transformer, self.step = start(rank, depth=depth)
        self.given = inputs_of(self.transformer, self.step)

    @contextmanager
    def session(self) -> Iterator[Session]:
        """Run with a session from now on."""
        session = use(self.group, None, policy=PlanPolicy.fixed(FLAT, sends_early=lambda *_: False))
        with NO_MLP, torch.no_grad():
            yield session
        session.close()
        assert not session.layers_run_stock

    def call(self, **changed: torch.Tensor) -> torch.Tensor:
        """Return the output of the transformer with some other inputs."""
        return self.transformer(**{**self.given, **changed})[0]

    @property
    def longer(self) -> dict[str, torch.Tensor]:
        """Inputs with a longer text, of another size."""
        return {name: torch.cat([self.given[name]] * 8, -2) for name in ("encoder_hidden_states", "txt_ids")}


def calls_of(step: Callable) -> int:
    """Return the number of calls of the plugin's functions for attention and its layers in a step."""
    count = 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        file = frame.f_code.co_filename
        count += event == "call" and file.startswith(FOLDERS) and not file.endswith(KERNELS)

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def run_stock(rank: int, depth: int) -> tuple[int, int, bool]:
    """Return the calls of a step before and after the choice, and whether another size is tuned anew."""
    model = Model(rank, depth)
    expected = model.step().clone()
    with model.session() as session:
        session.begin_run(20)
        assert torch.equal(model.call(), expected)  # shows how V is built
        before = calls_of(model.call)
        assert torch.equal(model.call(), expected) and session.layers_run_stock
        after = calls_of(model.call)
        assert torch.equal(model.call(), expected)
        model.call(**model.longer)
        resumes = not session.layers_run_stock
    return before, after, resumes


def test_a_step_of_stock_has_no_calls_of_the_plugin_in_its_layers() -> None:
    few, many = ranks.run(run_stock, 2, 2)[0], ranks.run(run_stock, 2, 4)[0]
    assert few[0] < many[0]
    assert few[1] == many[1] < 10
    assert few[2] and many[2]


def interrupt(rank: int) -> bool:
    """Return whether a request after one that rank 1 has begun and rank 0 has not runs stock in the end."""
    model = Model(rank, 2)

    def request(**changed: torch.Tensor) -> None:
        run = session.begin_run(1)
        model.call(**changed)
        session.end_step(run)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with model.session() as session:
        for _ in range(4):
            request()
        assert session.layers_run_stock
        run = session.begin_run(1)
        if rank == 1:
            hook = model.transformer.x_embedder.register_forward_pre_hook(stop)
            try:
                model.call(**model.longer)
            except KeyboardInterrupt:
                hook.remove()
        session.end_run(run)
        for _ in range(4):
            request(**model.longer)
        return session.layers_run_stock


def test_ranks_agree_after_an_interrupt() -> None:
    assert ranks.run(interrupt, 2) == [True, True]
