"""Idle share of cores."""

import os
import time
from pathlib import Path

import pytest

from xfuser_cocodiff.lab.emulation.core_times import CoreTimes

# Columns: user, nice, system, idle, iowait, irq, softirq, steal, guest (part of user), guest_nice.
EARLIER = """cpu  100 0 100 1000 0 0 0 0 0 0
cpu0 50 0 50 500 0 0 0 0 0 0
cpu1 50 0 50 500 0 0 0 0 0 0
cpu2 0 0 0 0 0 0 0 0 0 0
intr 1234
"""
LATER = """cpu  170 0 110 1120 0 0 0 0 0 0
cpu0 80 0 60 540 10 0 0 10 30 0
cpu1 50 40 50 560 0 0 0 0 0 0
cpu2 7 0 0 0 0 0 0 0 0 0
intr 2345
"""


def test_idle_shares_between_two_readings() -> None:
    """Of 100 ticks, core 0 waits for 40 and for a disk for 10; 10 are stolen, and a guest's are part of the user's.

    Core 1 runs a niced program for 40 of them, which gives way to ranks.
    """
    earlier, later = (CoreTimes.parse(text, {0, 1}) for text in (EARLIER, LATER))
    assert later.idle_shares(earlier) == {0: 0.5, 1: 1.0}
    assert later.idle_shares(later) == {0: 1.0, 1: 1.0}


def test_niced_programs_keep_cores_busy_for_niced_ranks() -> None:
    earlier, later = (CoreTimes.parse(text, {0, 1}, preempts_niced=False) for text in (EARLIER, LATER))
    assert later.idle_shares(earlier) == {0: 0.5, 1: 0.6}


@pytest.mark.parametrize(("nice", "niced_ticks"), [(-5, 40), (0, 40), (1, 0), (19, 0)])
def test_the_nice_value_of_this_process_decides(monkeypatch: pytest.MonkeyPatch, nice: int, niced_ticks: int) -> None:
    monkeypatch.setattr(os, "getpriority", lambda which, who: nice)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1})
    monkeypatch.setattr(Path, "read_text", lambda path: LATER)
    assert CoreTimes.now().idle == {1: 560 + niced_ticks}


def test_a_busy_core_is_not_idle() -> None:
    [core, *_] = cores = sorted(os.sched_getaffinity(0))
    earlier = CoreTimes.now()
    assert sorted(earlier.total) == cores
    os.sched_setaffinity(0, {core})
    try:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            pass
        assert CoreTimes.now().idle_shares(earlier)[core] <= 0.2
    finally:
        os.sched_setaffinity(0, cores)
