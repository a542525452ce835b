"""Races of schedules over steps whose times are known, without ranks."""

import itertools
import random
from collections.abc import Callable, Mapping

import pytest

from xfuser_cocodiff.attention.race import LEAST_ROUNDS, MOST_ROUNDS, Race
from xfuser_cocodiff.attention.schedule import BESIDE, BESIDE_O, BESIDE_QKV, Schedule, Trial

PLAIN, AHEAD, TWO, FOUR, EIGHT = SCHEDULES = [Schedule(), *(Schedule(True, groups) for groups in (1, 2, 4, 8))]
Pace = Callable[[int], float]
"""Of the machine, at a step."""


def run(
    times: Mapping[Schedule, float],
    trials: list[Trial],
    pace: Pace = lambda step: 1.0,
    layers: Callable[[int], int] = lambda step: 3,
    usual: Callable[[int], bool] = lambda step: True,
    steps: int = 200,
) -> list[Schedule]:
    """A race in which a step takes what `times` say of the first trial's schedule; by which its steps have run."""
    race, ran = Race(tuple(trials)), []
    for step in range(steps):
        if race.is_over:
            break
        ran.append(trials[0].schedule)
        for trial in trials:
            for _ in range(layers(step)):
                trial.ran(usual(step))
        race.took(times[trials[0].schedule] * pace(step) if layers(step) and usual(step) else 99.0 / (1 + step))
        if race.is_ripe or step == 0:
            race.decide([2 * seconds for seconds in race.report()], goes_on=True)  # of two ranks that are alike
        for trial in trials:
            trial.end_step()
    return ran


def by(*seconds: float) -> dict[Schedule, float]:
    return dict(zip(SCHEDULES, seconds, strict=False))


PACES: dict[str, Pace] = {
    "steady": lambda step: 1.0,
    "slower and slower": lambda step: 1 + step / 40,
    "noisy": lambda step: random.Random(step).uniform(0.99, 1.01),
}


@pytest.mark.parametrize("pace", PACES)
@pytest.mark.parametrize(
    ("seconds", "fastest"),
    [
        ([3.0, 2.0, 1.0], TWO),
        ([3.0, 2.0, 2.5], AHEAD),
        ([1.0, 2.0, 0.999], PLAIN),
        ([1.0, 0.92], AHEAD),
        ([1.0, 1.02, 0.97], TWO),
        ([3.0, 2.9, 2.5, 2.0, 1.0], EIGHT),
        ([3.0, 2.0, 2.2, 1.0, 1.0], AHEAD),  # more groups than those that do not help are not tried
    ],
)
def test_the_fastest_schedule_is_taken(seconds: list[float], fastest: Schedule, pace: str) -> None:
    trial, first = Trial(SCHEDULES[: len(seconds)]), itertools.count()
    ran = run(by(*seconds), [trial], lambda step: PACES[pace](step) + (5.0 if next(first) < 3 else 0.0))
    assert trial.chosen == fastest
    assert len(ran) <= 2 + sum((1 + MOST_ROUNDS) * some for some in (3, 2, 2))


def test_what_cannot_be_told_apart_stays_as_it_is() -> None:
    chance = random.Random(0)
    for _ in range(20):
        trial = Trial(SCHEDULES[:3])
        run(by(1.0, 1.0, 1.05), [trial], lambda step: chance.uniform(0.7, 1.3))
        assert trial.chosen in (PLAIN, AHEAD)
    trials = [Trial(SCHEDULES[:2]) for _ in range(60)]
    for trial in trials:
        run(by(1.0, 1.0), [trial], lambda step: chance.uniform(0.8, 1.2))
    assert sum(trial.chosen == PLAIN for trial in trials) >= 50


def test_a_clear_race_is_short() -> None:
    assert len(run(by(1.0, 1.2, 1.3), [Trial(SCHEDULES[:3])])) <= 2 + 3 * (1 + LEAST_ROUNDS)


@pytest.mark.parametrize(
    ("beside", "expected"),
    [((0.9, 1.5), BESIDE_QKV), ((1.5, 0.9), BESIDE_O), ((0.9, 0.8), BESIDE_O), ((0.999, 2.1), "")],
)
@pytest.mark.parametrize("count", [1, 3])
def test_the_best_of_them_is_tried_with_an_mlp_beside(count: int, beside: tuple[float, float], expected: str) -> None:
    trial, best = Trial(SCHEDULES[:count], has_mlp=True), [PLAIN, None, AHEAD][count - 1]
    times = by(3.0, 2.0, 2.5)
    times |= {best._replace(beside=what): times[best] * took for what, took in zip(BESIDE, beside, strict=True)}
    assert {schedule for schedule in run(times, [trial]) if schedule.beside} == {
        best._replace(beside=what) for what in BESIDE
    }
    assert trial.chosen == best._replace(beside=expected)


def test_kinds_of_layers_run_by_one_schedule_as_far_as_they_can() -> None:
    trials = [Trial([PLAIN, AHEAD, TWO], has_mlp=True), Trial([PLAIN]), Trial([PLAIN, AHEAD])]
    times = by(1.0, 0.9, 0.8) | {
        TWO._replace(beside=what): seconds for what, seconds in zip(BESIDE, (0.9, 0.7), strict=True)
    }
    run(times, trials)
    assert [trial.chosen for trial in trials] == [TWO._replace(beside=BESIDE_O), PLAIN, AHEAD]


def test_steps_in_which_less_is_done_say_nothing() -> None:
    for odd in ({"layers": lambda step: 0 if step % 3 == 1 else 3}, {"usual": lambda step: step % 10 != 9}):
        trial = Trial([PLAIN, AHEAD])
        run(by(1.0, 0.95), [trial], **odd)
        assert trial.chosen == AHEAD


def test_without_time_everything_runs_by_the_best_so_far() -> None:
    trial = Trial(SCHEDULES[:2])
    race = Race((trial,))
    for step in range(60):
        assert trial.schedule == PLAIN or step > 20
        trial.ran()
        race.took(by(3.0, 2.0)[trial.schedule])
        race.decide(race.report(), goes_on=step >= 20)
        trial.end_step()
    assert trial.chosen == AHEAD


def test_only_what_takes_longer_than_the_best_costs() -> None:
    trial = Trial(SCHEDULES[:3])
    race = Race((trial,))
    race.decide([], goes_on=True)
    for seconds, cost in (
        (9.0, 0.0),
        (1.0, 0.0),
        (1.5, 0.5),
        (0.5, 0.5),
        (3.0, 2.5),
    ):  # and the round after goes the other way
        trial.ran()
        race.took(seconds)
        trial.end_step()
        assert race.cost_seconds == pytest.approx(cost)
        if race.is_ripe:
            race.decide(race.report(), goes_on=True)
