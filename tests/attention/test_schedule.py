"""Trials of schedules, and what they may cost of a run, without ranks."""

import pytest

from xfuser_cocodiff.attention.schedule import BESIDE, BESIDE_O, BESIDE_QKV, SAMPLES, Allowance, Schedule, Trial

SCHEDULES = [Schedule(), *(Schedule(True, groups) for groups in (1, 2, 4, 8))]


def settle(times: list[float], layers: int, first: float = 0.0, steps: int = 60) -> tuple[Trial, list[list[int]]]:
    """A trial in which layers take what `times` say of their schedule, the first of each `first` longer; and by which
    schedules the layers of each step ran."""
    trial, ran, seen = Trial(SCHEDULES[: len(times)]), [], set()
    for _ in range(steps):
        ran.append([])
        for _ in range(layers):
            number = SCHEDULES.index(trial.schedule)
            trial.took(times[number] + (0 if number in seen else first))
            seen.add(number)
            ran[-1].append(number)
        if trial.is_ripe or len(ran) == 1:
            trial.decide([2 * seconds for seconds in trial.report()], goes_on=True)  # of two ranks that are alike
        trial.end_step()
    return trial, ran


@pytest.mark.parametrize("layers", [1, 3, 19])
@pytest.mark.parametrize(
    ("times", "fastest"),
    [
        ([3.0, 2.0, 1.0], 2),
        ([3.0, 2.0, 2.5], 1),
        ([1.0, 2.0, 0.99], 0),
        ([1.0, 0.99], 0),
        ([3.0, 2.9, 2.5, 2.0, 1.0], 4),
    ],
)
def test_a_trial_takes_the_fastest_schedule(times: list[float], fastest: int, layers: int) -> None:
    trial, _ = settle(times, layers, first=5.0)
    assert trial.chosen == SCHEDULES[fastest]


def test_more_groups_than_those_that_do_not_help_are_not_tried() -> None:
    _, ran = settle([3.0, 2.0, 2.1, 1.0, 1.0], 8)
    assert {number for step in ran for number in step} == {0, 1, 2}


def test_few_layers_of_a_step_run_by_what_is_tried() -> None:
    _, ran = settle([1.0, 3.0, 3.0], 16)
    for step in ran:
        assert sum(number > 0 for number in step) <= 4
    assert sum(number > 0 for step in ran for number in step) == 2 * (SAMPLES + 1), "no more than it takes to decide"


def test_without_time_everything_runs_by_the_best_so_far() -> None:
    trial = Trial(SCHEDULES[:3])
    for step in range(40):
        for _ in range(4):
            number = SCHEDULES.index(trial.schedule)
            assert number == 0 or step > 20
            trial.took([3.0, 2.0, 1.0][number])
        trial.decide(trial.report(), goes_on=step >= 20)
        trial.end_step()
    assert trial.chosen == SCHEDULES[2]


def test_only_what_takes_longer_than_the_best_costs() -> None:
    trial = Trial(SCHEDULES[:2])
    for seconds in (9.0, 1.0, 1.0, 1.0):
        trial.took(seconds)
    trial.decide(trial.report(), goes_on=True)
    trial.end_step()
    assert trial.cost_seconds == 0
    for seconds in (1.5, 0.5):
        assert trial.schedule == SCHEDULES[1]
        trial.took(seconds)
    assert trial.schedule == SCHEDULES[0]
    trial.took(7.0)
    assert trial.cost_seconds == pytest.approx(0.5)


def test_trials_may_take_a_share_of_the_run() -> None:
    allowance = Allowance(0.03)
    allowance.begin_run(28)
    assert allowance.left == 0 and allowance.whole is None  # nobody knows how long a step takes
    allowance.learn(1.0, 2, 0.0)
    assert allowance.left == allowance.whole == pytest.approx(0.84)
    allowance.learn(1.0, 3, 0.5)
    assert allowance.left == pytest.approx(0.34) and allowance.whole == pytest.approx(0.84)
    allowance.begin_run(None)  # of unknown length: a share of what has passed
    allowance.learn(1.0, 10, 0.0)
    assert allowance.left == pytest.approx(0.3) and allowance.whole is None


@pytest.mark.parametrize(
    ("beside", "expected"),
    [((1.0, 1.5), BESIDE_QKV), ((1.5, 1.0), BESIDE_O), ((1.5, 1.49), BESIDE_QKV), ((1.99, 2.1), "")],
)
@pytest.mark.parametrize("count", [1, 3])
def test_the_best_of_them_is_tried_with_an_mlp_beside(count: int, beside: tuple[float, float], expected: str) -> None:
    trial, times, tried = Trial(SCHEDULES[:count], has_mlp=True), [3.0, 2.0, 2.5], set()
    best = [3.0, None, 2.0][count - 1]
    for _ in range(60):
        for _ in range(4):
            tried.add(trial.schedule)
            what = trial.schedule.beside
            trial.took(best - 2.0 + beside[what == BESIDE_O] if what else times[SCHEDULES.index(trial.schedule)])
        trial.decide(trial.report(), goes_on=True)
        trial.end_step()
    fastest = SCHEDULES[0] if count == 1 else SCHEDULES[1]
    assert {schedule for schedule in tried if schedule.beside} == {fastest._replace(beside=what) for what in BESIDE}
    assert trial.chosen == fastest._replace(beside=expected)
