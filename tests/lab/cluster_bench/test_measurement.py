"""Runs of recorded steps that other processes of this machine disturb."""

from xfuser_cocodiff.lab.cluster_bench.measurement import Run, least_disturbed

LATE, IN_TIME = 0.03, 0.005
"""Delays of a step of a second; 1 % is the limit."""


def test_a_disturbed_run_is_repeated() -> None:
    runs = [Run(1.2, 1.0, LATE), Run(1.0, 1.0, IN_TIME), Run(5.0, 1.0, 0.0)]
    assert least_disturbed(lambda: runs.pop(0)) == (Run(1.0, 1.0, IN_TIME), 1)


def test_an_undisturbed_run_counts_whatever_its_time() -> None:
    """Otherwise slow runs would be dropped, and the range of the repeats would say nothing."""
    runs = [Run(9.0, 1.0, IN_TIME), Run(1.0, 1.0, 0.0)]
    assert least_disturbed(lambda: runs.pop(0)) == (Run(9.0, 1.0, IN_TIME), 0)


def test_a_run_that_is_always_disturbed_stays_late_so_that_its_time_is_invalid() -> None:
    runs = [Run(1.2, 1.0, 2 * LATE), Run(1.3, 1.0, LATE), Run(1.4, 1.0, 3 * LATE), Run(1.0, 1.0, 0.0)]
    run, repeated = least_disturbed(lambda: runs.pop(0))
    assert (run.late_seconds, repeated) == (LATE, 2)
