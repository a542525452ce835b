"""Where stock is fastest, its own functions run in the layers, and no code of the plugin does."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from unittest import mock

import torch

import xfuser_cocodiff
from tests import ranks
from tests.xdit.attention.test_overlap import inputs_of, start, use
from xfuser_cocodiff.engine.comm.policy import PlanPolicy
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.integration import activation
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig

FOLDERS = tuple(str(Path(xfuser_cocodiff.__file__).parent / "xdit" / name) for name in ("attention", "layers"))
KERNELS = "attention_kernels.py"
"""Of CPUs, in stock too."""
FLAT = Plan.flat(Topology.flat(2))


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


def rest(rank: int, depth: int) -> tuple[int, int, bool]:
    """Return the calls of a step before and after the choice, and whether another size is tuned anew."""
    group, transformer, step = start(rank, depth=depth)
    given, expected = inputs_of(transformer, step), step()
    session = use(group, None, policy=PlanPolicy(lambda size: FLAT, sends_early=lambda *_: False))
    session.config = CocoDiffConfig(topology=Topology.flat(2))
    session.switch_layers = activation.switch_layers
    with mock.patch("xfuser_cocodiff.xdit.layers.layer.has_parallel_mlp", lambda block: False):
        assert torch.equal(step(), expected)  # shows how V is built
        before = calls_of(step)
        assert torch.equal(step(), expected) and session.rests
        after = calls_of(step)
        assert torch.equal(step(), expected)
        names = "encoder_hidden_states", "txt_ids"
        longer = {name: torch.cat([given[name]] * 8, -2) for name in names}
        with torch.no_grad():
            transformer(**{**given, **longer})
        resumes = not session.rests
    session.close()
    assert not session.rests
    return before, after, resumes


def test_a_step_of_stock_has_no_calls_of_the_plugin_in_its_layers() -> None:
    few, many = ranks.run(rest, 2, 2)[0], ranks.run(rest, 2, 4)[0]
    assert few[0] < many[0]
    assert few[1] == many[1] < 10
    assert few[2] and many[2]
