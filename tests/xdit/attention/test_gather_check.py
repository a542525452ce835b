"""The check of gathered K and V in exact mode, on real ranks: other bits on any rank lead to heads on all ranks."""

import contextlib
from collections.abc import Callable
from unittest import mock

import pytest
import torch

from tests import ranks
from tests.engine.topology.test_planner import profile_of
from tests.xdit.attention.test_overlap import start, use_config
from xfuser_cocodiff.engine.autotune import comm_setup
from xfuser_cocodiff.engine.autotune.tuning_cache import TuningCache
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.attention import schedule_choice
from xfuser_cocodiff.xdit.session.session import Session
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig, Overlap

TOPOLOGY = Topology.parse("node=2", 2)
FORCED = Plan.parse("hierarchical:node=kv", TOPOLOGY)
STEPS = 5


def depend_on_queries(get: Callable) -> Callable:
    """Return a getter of attention functions whose bits depend on the number of queries."""

    def get_dependent(backend: object = None) -> Callable:
        function = get(backend=backend)

        def dependent(query: torch.Tensor, *args: object, **kwargs: object) -> tuple:
            result, *rest = function(query, *args, **kwargs)
            return result * (1 + query.shape[2] * 2**-20), *rest

        return dependent

    return get_dependent


class Run:
    """Steps of a FLUX.1 with double and single blocks on one rank.

    Args:
        rank: number of the rank.
        is_odd: whether bits of this rank's attention depend on the number of queries.
    """

    def __init__(self, rank: int, is_odd: bool) -> None:
        from xfuser.model_executor.layers import usp

        self._group, _, self._step = start(rank, depth=3)
        self.lines: list[str] = []
        self._patches = [mock.patch.object(schedule_choice, "info_once", self.lines.append)]
        if is_odd:
            odd = depend_on_queries(usp._get_attention_function)
            self._patches.append(mock.patch.object(usp, "_get_attention_function", odd))

    def session(self, config: CocoDiffConfig, cache: TuningCache | None = None) -> tuple[Session, bool]:
        """Return a session after a run with it, and whether the outputs of all steps equal stock's."""
        with contextlib.ExitStack() as stack:
            for patch in self._patches:
                stack.enter_context(patch)
            expected = self._step()
            session = use_config(self._group, config, cache)
            session.begin_run(STEPS)
            results = []
            for _ in range(STEPS):
                results.append(self._step())
                session.end_step()
        return session, all(torch.equal(result, expected) for result in results)


def candidates(session: Session) -> list[list[tuple[int, bool]]]:
    """Return the head groups of all candidate schedules by layer signature, and whether they gather."""
    return [[(each.groups, each.gathers_kv) for each in of.candidates.schedules] for of in session.layers.signatures]


def force(rank: int, odd_ranks: tuple[int, ...], groups: int) -> tuple[bool, list, list[str]]:
    """Return whether outputs equal stock's, the candidates and the INFO lines, with a plan that gathers."""
    run = Run(rank, rank in odd_ranks)
    session, is_stocks = run.session(CocoDiffConfig(topology=TOPOLOGY, plan=FORCED, overlap=Overlap(True, groups)))
    return is_stocks, candidates(session), run.lines


@pytest.mark.parametrize("groups", [1, 2])
def test_forced_plan_gathers_where_the_bits_are_stocks(groups: int) -> None:
    for is_stocks, found, lines in ranks.run(force, 2, (), groups):
        assert is_stocks and not lines
        assert found == [[(groups, True)]] * 2  # of double and of single blocks


@pytest.mark.parametrize("odd_ranks", [(0, 1), (1,)])
def test_other_bits_on_one_rank_lead_to_heads_on_all(odd_ranks: tuple[int, ...]) -> None:
    for is_stocks, found, lines in ranks.run(force, 2, odd_ranks, 1):
        assert is_stocks
        assert found == [[(1, False)]] * 2
        assert len({*lines}) == 1 and "K and V are not gathered" in lines[0]  # logged once for each session


def choose(rank: int, paying_ranks: tuple[int, ...], odd_ranks: tuple[int, ...]) -> tuple[bool, list, list[str]]:
    """Return the same where the planner decides, by a prediction that differs between ranks."""
    run, links = Run(rank, rank in odd_ranks), profile_of([2], [1e3], latency=0.0, launch=0.0)
    pays = mock.patch.object(comm_setup.planner, "gather_pays", lambda *_: rank in paying_ranks)
    axes = mock.patch.object(comm_setup, "_gathered_axes", lambda *_: (links.topology.axes[0].name,))
    with pays, axes:
        session, is_stocks = run.session(CocoDiffConfig(topology=links.topology), TuningCache({}, links))
    return is_stocks, candidates(session), run.lines


@pytest.mark.parametrize(
    ("paying_ranks", "odd_ranks", "is_candidate"),
    [((0, 1), (), True), ((0,), (), False), ((0, 1), (0,), False)],
)
def test_planner_adds_a_candidate_if_it_pays_and_keeps_bits_on_all_ranks(
    paying_ranks: tuple[int, ...], odd_ranks: tuple[int, ...], is_candidate: bool
) -> None:
    for is_stocks, found, lines in ranks.run(choose, 2, paying_ranks, odd_ranks):
        assert is_stocks and not lines  # nobody has asked for a gather
        assert len(found) == 2
        for schedules in found:
            assert any(gathers for _, gathers in schedules) == is_candidate
            assert not all(gathers for _, gathers in schedules)
