"""What a kind of layer may run by, and what trying may cost of a run, without ranks."""

import pytest

from xfuser_cocodiff.attention.schedule import BESIDE_O, Allowance, Schedule, Trial

PLAIN, AHEAD, TWO, FOUR = Schedule(), Schedule(True), Schedule(True, 2), Schedule(True, 4)


@pytest.mark.parametrize(
    ("schedules", "has_mlp", "wanted", "nearest"),
    [
        ([PLAIN, AHEAD, TWO], False, AHEAD, AHEAD),
        ([PLAIN, AHEAD, TWO], False, FOUR, TWO),
        ([PLAIN, AHEAD], False, TWO, AHEAD),
        ([PLAIN, AHEAD], False, PLAIN, PLAIN),
        ([PLAIN], True, TWO._replace(beside=BESIDE_O), PLAIN._replace(beside=BESIDE_O)),
        ([PLAIN, AHEAD], False, AHEAD._replace(beside=BESIDE_O), AHEAD),
        ([TWO, FOUR], False, PLAIN, TWO),  # whose number of groups is fixed
        ([Schedule(False, 2)], False, AHEAD, Schedule(False, 2)),
    ],
)
def test_a_kind_runs_by_what_is_nearest_to_a_schedule_for_all(
    schedules: list[Schedule], has_mlp: bool, wanted: Schedule, nearest: Schedule
) -> None:
    trial = Trial(schedules, has_mlp)
    trial.run_by(wanted)
    assert trial.nearest(wanted) == nearest
    assert trial.schedule == nearest


def test_where_there_is_no_choice_it_is_made() -> None:
    assert Trial([TWO]).chosen == TWO
    assert Trial([TWO], has_mlp=True).chosen is None
    assert Trial([PLAIN, TWO]).chosen is None
    trial = Trial([TWO])
    trial.run_by(PLAIN)
    assert trial.schedule == TWO


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
