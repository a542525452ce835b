"""Text that does not divide: xDiT gives each rank all of it, and here its Q, K and V stay where they are."""

import os
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from tests import ranks

TEXT, IMAGE, WIDTH, DEPTH = 61, 64, 128, 3


def start(text_tokens: int) -> tuple[object, torch.nn.Module, Callable[..., torch.Tensor]]:
    """The group, and a FLUX transformer and its step, with so much text."""
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "0"  # not used: the ranks have met
    from xfuser_cocodiff.bench import transformer
    from xfuser_cocodiff.xdit.launching import world

    group, built, build = world.start(), [], world.flux_transformer
    with (
        mock.patch.object(transformer, "text_tokens", lambda _: text_tokens),
        mock.patch.object(world, "flux_transformer", lambda *sizes: built.append(build(*sizes)) or built[0]),
    ):
        step = transformer.step(transformer.Shape(WIDTH, DEPTH, IMAGE, 8))
    return group, built[0], step


def bytes_of_steps(rank: int, overlap: tuple, plan: str) -> list[int]:
    """That a rank sends in each step, all of which have stock's bits."""
    from xfuser_cocodiff.machine.plan import Plan
    from xfuser_cocodiff.machine.topology import Topology
    from xfuser_cocodiff.settings.config import CocoDiffConfig, Overlap
    from xfuser_cocodiff.xdit.engine import start as starting
    from xfuser_cocodiff.xdit.launching import world

    group, _, step = start(TEXT)
    expected = [step(place / 8) for place in range(8)]
    topology = Topology.parse("2x2", 4)
    config = CocoDiffConfig(topology=topology, overlap=Overlap(*overlap), plan=Plan.parse(plan, topology))
    engine = starting.engine_over(group, config, at_once=False)
    world.use(engine)
    engine.runs.begin(8)
    sent = []
    for place in range(8):
        engine.traffic.reset()
        assert torch.equal(step(place / 8), expected[place]), place
        sent.append(sum(engine.traffic.sent_bytes.values()))
        engine.runs.end_step()
    return sent


@pytest.mark.parametrize(("overlap", "plan"), [((True, 2), "flat"), ((False, 1), "hierarchical"), ((True, 1), "flat*")])
def test_text_that_all_ranks_have_stays_where_it_is(overlap: tuple, plan: str) -> None:
    for sent in ranks.run(bytes_of_steps, 4, overlap, plan):
        crossing = 1.0 if plan == "hierarchical" else 0.75
        whole, left = (
            crossing * DEPTH * WIDTH * 4 * tokens for tokens in (4 * (TEXT + IMAGE // 4), 4 * (IMAGE // 4) + TEXT)
        )
        assert sent[0] == whole and sent[-1] == left < 0.5 * whole
        assert sent == sorted(sent, reverse=True)


def differ(rank: int) -> list[tuple[bool, bool]]:
    """Of each step, whether it had stock's bits, and whether text had stayed where it was; and what was said. From the
    fifth step on one rank has another text."""
    from xfuser_cocodiff.machine.topology import Topology
    from xfuser_cocodiff.settings.config import CocoDiffConfig
    from xfuser_cocodiff.xdit.engine import engine as engines
    from xfuser_cocodiff.xdit.engine import start as starting
    from xfuser_cocodiff.xdit.launching import world

    group, transformer, step = start(TEXT)
    is_other = [False]
    transformer.context_embedder.register_forward_hook(lambda _, __, text: text + 0.1 * rank * is_other[0])
    expected = [step()]
    is_other[0] = True
    expected.append(step())
    notes: list[str] = []
    with mock.patch.object(engines, "note", notes.append):
        engine = starting.engine_over(group, CocoDiffConfig(topology=Topology.flat(2)), at_once=False)
        world.use(engine)
        engine.runs.begin(8)
        found = []
        for number in range(8):
            is_other[0] = number >= 4
            engine.traffic.reset()
            is_equal = torch.equal(step(), expected[is_other[0]])
            found.append((is_equal, sum(engine.traffic.sent_bytes.values())))
            engine.runs.end_step()
    most = max(sent for _, sent in found)
    assert [note for note in notes if "were not alike" in note]
    return [(is_equal, sent < most) for is_equal, sent in found]


def test_text_that_is_not_alike_any_more_is_said_and_travels() -> None:
    for steps in ranks.run(differ, 2):
        assert steps[3] == (True, True)  # it stays
        assert steps[4][1]  # and this step has each rank's own
        assert steps[5:] == [(True, False)] * 3


def test_text_that_ranks_share_is_not_looked_at() -> None:
    assert ranks.run(looks, 2) == [0, 0]


def looks(rank: int) -> int:
    """How often ranks compared tokens."""
    from xfuser_cocodiff.attention.alike import AlikeTokens
    from xfuser_cocodiff.machine.topology import Topology
    from xfuser_cocodiff.settings.config import CocoDiffConfig
    from xfuser_cocodiff.xdit.engine import start as starting
    from xfuser_cocodiff.xdit.launching import world

    group, _, step = start(TEXT + 1)
    world.use(starting.engine_over(group, CocoDiffConfig(topology=Topology.flat(2)), at_once=False))
    with mock.patch.object(AlikeTokens, "look", autospec=True) as look:
        for _ in range(4):
            step()
    return look.call_count
