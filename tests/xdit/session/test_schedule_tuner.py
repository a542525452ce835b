"""Autotuning of schedules by whole steps, on a mock clock."""

from types import SimpleNamespace

import pytest
import torch

from tests import ranks
from tests.engine.topology.test_planner import profile_of
from tests.xdit.attention.test_overlap import start, use_config
from xfuser_cocodiff.engine.attention.overlap_schedule import OverlapSchedule
from xfuser_cocodiff.engine.autotune.tuning_cache import TuningCache
from xfuser_cocodiff.xdit.layers.schedule_candidates import ScheduleCandidates
from xfuser_cocodiff.xdit.session import schedule_tuner
from xfuser_cocodiff.xdit.session import session as session_module
from xfuser_cocodiff.xdit.session.schedule_tuner import ScheduleTuner
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig

CPU = torch.device("cpu")
FLAT, V_FIRST = OverlapSchedule(stock=True), OverlapSchedule(True)
IN_TWO, IN_FOUR = V_FIRST._replace(groups=2), V_FIRST._replace(groups=4)
NUM_ROUNDS = 8
"""Number of rounds with two candidates."""


class FakeClock:
    """A mock clock that stands still between steps."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    made = FakeClock()
    monkeypatch.setattr(schedule_tuner, "time", made)
    return made


class Steps:
    """Steps of a session, in which layers of several signatures run by their schedules."""

    def __init__(self, clock: FakeClock, *candidates: ScheduleCandidates, stock: float = 1.0) -> None:
        self._clock, self.candidates = clock, list(candidates)
        self.seconds = {FLAT: stock, V_FIRST: 1.0, IN_TWO: 1.0, IN_FOUR: 1.0}
        self.reduced: list[list[float]] = []
        """Times of which the mean over all ranks was computed."""
        self.tuner = ScheduleTuner(lambda: self.candidates, self._reduce, lambda value: True, CPU, lambda: None)
        self.tuner.begin_run()

    def _reduce(self, values: list[float]) -> list[float]:
        self.reduced.append(values)
        return values

    def run(
        self, *ran: ScheduleCandidates, calls: int = 2, is_representative: bool = True, delay: float = 0.0
    ) -> list[OverlapSchedule]:
        """Run a step with layers of some signatures, and return their schedules."""
        schedules = [each.schedule for each in ran]
        self._clock.now += delay + sum(self.seconds[one] for one in schedules)
        for each in ran:
            for _ in range(calls):
                each.count_call(is_representative)
        self.tuner.end_step()
        return schedules


def test_steps_with_caches_or_keyframes_are_not_timed(clock: FakeClock) -> None:
    candidates = one, _ = ScheduleCandidates([FLAT, V_FIRST]), ScheduleCandidates([FLAT, V_FIRST])
    steps = Steps(clock, *candidates, stock=0.5)
    steps.run(*candidates)
    for _ in range(NUM_ROUNDS):
        assert one.chosen is None
        candidate = one.schedule
        steps.run(*candidates, is_representative=False, delay=9.0)
        steps.run(*candidates, calls=1)
        steps.run(one)
        steps.run()
        assert steps.run(*candidates) == [candidate] * 2
    assert [each.chosen for each in candidates] == [FLAT] * 2


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((1.2, 0.9, 0.8), IN_FOUR),
        ((0.7, 0.8, 0.9), FLAT),
        ((1.2, 0.995, 0.992), V_FIRST),
    ],
)
def test_the_candidate_that_saves_the_most_is_chosen(
    clock: FakeClock, seconds: tuple[float, ...], expected: OverlapSchedule
) -> None:
    layer = ScheduleCandidates([FLAT, V_FIRST, IN_TWO, IN_FOUR])
    steps = Steps(clock, layer)
    steps.seconds |= dict(zip((FLAT, IN_TWO, IN_FOUR), seconds, strict=True))
    ran = [schedule for _ in range(1 + 16) for schedule in steps.run(layer)]
    assert ran[0] == V_FIRST
    assert {each: ran[1:].count(each) for each in layer.schedules} == dict.fromkeys(layer.schedules, 4)
    for first in (1, 5, 9, 13):
        assert set(ran[first : first + 4]) == {*layer.schedules}
    assert ran[1:5] == ran[8:4:-1] == ran[9:13]  # a drift favors no candidate
    assert layer.chosen == expected and len(steps.reduced) == 1


def test_layers_with_fewer_candidates_keep_the_plugins_schedule(clock: FakeClock) -> None:
    candidates = many, few = ScheduleCandidates([FLAT, V_FIRST, IN_TWO]), ScheduleCandidates([FLAT, V_FIRST])
    steps = Steps(clock, *candidates, stock=1.1)
    steps.seconds[IN_TWO] = 0.8
    ran = [tuple(steps.run(*candidates)) for _ in range(1 + 12)]
    assert {*ran} == {(V_FIRST, V_FIRST), (FLAT, FLAT), (IN_TWO, V_FIRST)}
    assert (many.chosen, few.chosen) == (IN_TWO, V_FIRST)


def test_no_tuning_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    ended_steps: list[int] = []
    session = session_module.Session()
    session.schedule_tuner = SimpleNamespace(end_step=lambda: ended_steps.append(1), begin_run=lambda: None)
    monkeypatch.setattr(session_module, "active", lambda: session)
    session.begin_run(3)
    session.end_step()
    monkeypatch.setattr(session_module, "is_captured", lambda: True)
    session.end_step()
    assert ended_steps == [1]
    monkeypatch.setattr(session_module, "is_captured", lambda: False)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    session.end_step()
    assert ended_steps == [1]


# On ranks.


def resume_after_unequal_steps(rank: int) -> tuple[list[bool], bool]:
    """End the last step of a run on one rank only, then run another one.

    Returns:
        For each step of the second run whether all ranks had the same schedules; whether all were chosen at the end.
    """
    group, _, step = start(rank, depth=3)
    links = profile_of([2], [1e3], latency=0.0, launch=0.0)
    session = use_config(group, CocoDiffConfig(topology=links.topology), TuningCache({}, links))
    session.begin_run(20)
    for _ in range(5):
        step()
        session.end_step()
    step()
    if rank == 0:
        session.end_step()
    session.begin_run(20)
    same = []
    for _ in range(3 + NUM_ROUNDS):
        same.append(
            session.all_agree(
                [str(signature.candidates.schedule) for signature in session.layers.signatures if signature.candidates]
            )
        )
        if not same[-1]:
            break
        step()
        session.end_step()
    return same, all(signature.candidates.chosen for signature in session.layers.signatures)


def test_ranks_have_the_same_candidates_after_a_run_of_unequal_steps() -> None:
    assert ranks.run(resume_after_unequal_steps, 2) == [([True] * (3 + NUM_ROUNDS), True)] * 2
