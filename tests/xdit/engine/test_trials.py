"""What is tried in the steps of a run, and what that may cost of it, on a clock that only work moves."""

from types import SimpleNamespace

import pytest
import torch

from xfuser_cocodiff.attention.schedule import Schedule, Trial
from xfuser_cocodiff.xdit.engine import engine as engines
from xfuser_cocodiff.xdit.engine import trials
from xfuser_cocodiff.xdit.engine.trials import Trials

CPU = torch.device("cpu")


class Clock:
    """The time, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(trials, "time", made)
    return made


class Links:
    """Stands for what is planned: links of which so many pieces are to be measured, and sizes whose plan is open."""

    def __init__(self, clock: Clock, pieces: int, seconds: float, sizes: tuple[int, ...] = ()) -> None:
        self._clock, self._seconds, self.left, self._pieces = clock, seconds, pieces, pieces
        plans = SimpleNamespace(
            open=list(sizes), settled={}, profile=None, contenders=lambda size: [], message=lambda size: size
        )
        plans.leave = plans.open.remove
        group = object()
        lane = SimpleNamespace(run=lambda work: work())
        topology = SimpleNamespace()
        policy, stages = SimpleNamespace(choose=plans), SimpleNamespace(groups={0: group})
        self.mesh = SimpleNamespace(policy=policy, stages=stages, lane=lane, topology=topology)
        self.meshes = [self.mesh] if sizes else []

    @property
    def probe(self) -> object | None:
        return self if self.left else None

    def go_on(self) -> None:
        self._clock.now += self._seconds
        self.left -= 1


def made(clock: Clock, links: Links, schedules: list[Trial] = []) -> tuple[Trials, list[int]]:  # noqa: B006
    """Trials, and the steps in which something was found."""
    found: list[int] = []

    def mean(values: list[float]) -> list[float]:
        clock.now += 0.03  # what it takes to agree
        return values

    tried = Trials([links], lambda: schedules, mean, CPU, lambda: found.append(1))
    tried.allowance.share = 0.03
    return tried, found


def run(clock: Clock, tried: Trials, steps: int, total: int | None, seconds: float = 1.0) -> float:
    """How long a run took beyond its steps."""
    began = clock.now
    tried.begin_run(total)
    for _ in range(steps):
        clock.now += seconds
        tried.end_step()
    return clock.now - began - steps * seconds


@pytest.mark.parametrize(("total", "runs"), [(28, 4), (None, 10)])
def test_links_are_measured_within_a_share_of_each_run(clock: Clock, total: int | None, runs: int) -> None:
    links = Links(clock, pieces=10, seconds=0.2)
    tried, found = made(clock, links)
    spent = []
    while links.left:
        spent.append(run(clock, tried, 28, total))
        assert not tried.settled
    assert 3 <= len(spent) <= runs and len(found) == 10
    for each in spent:
        assert each <= 0.03 * 28 + 0.03  # to agree that there is no more time
    assert run(clock, tried, 28, total) == 0, "nothing is left to agree on"


def test_a_run_whose_length_is_known_begins_early(clock: Clock) -> None:
    links = Links(clock, pieces=3, seconds=0.2)
    tried, _ = made(clock, links)
    run(clock, tried, 4, 50)
    assert links.left == 0


def test_schedules_race_by_whole_steps_while_links_are_measured(clock: Clock) -> None:
    links = Links(clock, pieces=2, seconds=0.01)
    trial = Trial([Schedule(), Schedule(True)])
    tried, found = made(clock, links, [trial])
    tried.begin_run(50)
    for _ in range(24):
        for _ in range(4):
            trial.ran()
        clock.now += 8.0 - trial.schedule.v_first
        tried.end_step()
    assert trial.chosen == Schedule(True)
    assert links.left == 0 and len(found) == 3


def test_what_raced_by_other_plans_races_anew(clock: Clock) -> None:
    """V first looked slow as long as nothing was known of the links, and is the faster one once they are."""
    links = Links(clock, pieces=9, seconds=0.01)
    trial = Trial([Schedule(), Schedule(True)])
    tried, _ = made(clock, links, [trial])
    tried.begin_run(50)
    for _ in range(50):
        trial.ran()
        clock.now += (9.0 if links.left else 7.0) if trial.schedule.v_first else 8.0
        tried.end_step()
    assert trial.chosen == Schedule(True)


def test_layers_that_come_up_later_have_a_race_of_their_own(clock: Clock) -> None:
    links = Links(clock, pieces=0, seconds=0)
    small, large = Trial([Schedule(), Schedule(True)]), Trial([Schedule(), Schedule(True)])
    tried, _ = made(clock, links, [small, large])
    for trial, gain in 4 * [(small, 1.0), (large, -1.0)]:  # requests of two sizes in turns
        tried.begin_run(8)
        for _ in range(8):
            trial.ran()
            clock.now += 8.0 - gain * trial.schedule.v_first
            tried.end_step()
    assert (small.chosen, large.chosen) == (Schedule(True), Schedule())


def test_a_step_in_which_a_part_of_the_layers_ran_says_nothing(clock: Clock) -> None:
    links = Links(clock, pieces=0, seconds=0)
    double, single = Trial([Schedule(), Schedule(True)]), Trial([Schedule(), Schedule(True)])
    tried, _ = made(clock, links, [double, single])
    tried.begin_run(60)
    for step in range(60):
        is_cached = step % 3 > 0  # but for its first layers
        double.ran()
        if not is_cached:
            single.ran()
        clock.now += (1.0 + 2.0 * double.schedule.v_first) if is_cached else 8.0 - double.schedule.v_first
        tried.end_step()
    assert double.chosen == single.chosen == Schedule(True)


def test_a_slow_first_step_says_nothing_of_the_others(clock: Clock) -> None:
    links = Links(clock, pieces=9, seconds=0.2)
    tried, _ = made(clock, links)
    tried.begin_run(28)
    for step in range(28):
        clock.now += 1.0 if step else 20.0
        tried.end_step()
    assert links.left >= 9 - 4


def test_ranks_do_not_agree_when_there_is_nothing_to_decide(clock: Clock) -> None:
    links = Links(clock, pieces=100, seconds=0.5)
    tried, _ = made(clock, links)
    agreed, mean = [], tried._mean
    tried._mean = lambda values: agreed.append(tried._steps) or mean(values)
    run(clock, tried, 50, 50)
    assert len(agreed) == 1 + 100 - links.left, "once, and after each piece"
    agreed.clear()
    run(clock, tried, 64, None)
    assert len(agreed) <= 7 + links._pieces - links.left


def test_the_largest_size_is_tried_for_which_there_is_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    links = Links(clock, pieces=0, seconds=0, sizes=(1000, 10, 1))  # as many milliseconds; the first never fits
    plans, efforts = links.mesh.policy.choose, []
    monkeypatch.setattr(trials.Plan, "flat", lambda topology: SimpleNamespace(stages=[0]))
    monkeypatch.setattr(trials, "trial_seconds", lambda _, __, size, effort: size * 0.01 * (effort[0] * effort[1]))

    def tries(_: object, __: object, size: int, effort: tuple[int, int], *___: object) -> str:
        efforts.append((size, effort))
        clock.now += size * 0.01 * effort[0] * effort[1]
        plans.open.remove(size)
        return "a plan"

    monkeypatch.setattr(trials, "tried", tries)
    tried, _ = made(clock, links)
    spent = run(clock, tried, 28, 28)
    assert efforts == [(10, (1, 3)), (1, (3, 5))]
    assert plans.settled == {10: "a plan", 1: "a plan"}
    assert plans.open == [], "what no run has time for is left to the planner"
    assert spent <= 0.03 * 28 + 0.1


def test_nothing_is_tried_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []
    engine = engines.Engine()
    engine.trials = SimpleNamespace(end_step=lambda: tries.append(1), begin_run=lambda total: None)
    monkeypatch.setattr(engines, "active", lambda: engine)
    engine.runs.begin(3)
    engine.runs.end_step()
    monkeypatch.setattr(engines, "is_captured", lambda: True)
    engine.runs.end_step()
    assert tries == [1]
    monkeypatch.setattr(engines, "is_captured", lambda: False)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    engine.runs.end_step()
    assert tries == [1]
