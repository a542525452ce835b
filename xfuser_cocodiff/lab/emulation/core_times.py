"""Share of a period in which this machine's cores were free for ranks, from /proc/stat."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

_CORE = re.compile(r"^cpu(\d+) (.*)$", re.MULTILINE)
_NICED, _IDLE, _WAITING, _GUEST = 1, 3, 4, 8
"""Columns of /proc/stat (man 5 proc): programs with a positive nice value; idle; waiting for input or output; the first
of the guests, which are contained in other columns."""


@dataclass(frozen=True)
class CoreTimes:
    """Times of each core since the machine started, in ticks of the kernel (10 ms)."""

    idle: dict[int, int]
    """Idle time by core; waiting for input or output included, and time of niced programs if ranks preempt them."""
    total: dict[int, int]
    """Time by core; what a hypervisor gave to others counts as not idle."""

    @classmethod
    def now(cls) -> "CoreTimes":
        """Return the times of the cores that this process may use.

        Ranks have this process's nice value. Without a positive one, they preempt niced programs as they wake up; with
        one, they share cores with these, and their own time is in that column.
        """
        preempts_niced = os.getpriority(os.PRIO_PROCESS, 0) <= 0
        return cls.parse(Path("/proc/stat").read_text(), os.sched_getaffinity(0), preempts_niced)

    @classmethod
    def parse(cls, text: str, cores: set[int], preempts_niced: bool = True) -> "CoreTimes":
        """Parse the contents of /proc/stat.

        Args:
            text: the contents.
            cores: numbers of the cores.
            preempts_niced: whether cores that run niced programs are free for ranks.
        """
        columns = {int(core): [int(ticks) for ticks in times.split()] for core, times in _CORE.findall(text)}
        own = {core: columns[core] for core in sorted(cores)}
        free = (_IDLE, _WAITING, *[_NICED] * preempts_niced)
        return cls(
            {core: sum(times[column] for column in free) for core, times in own.items()},
            {core: sum(times[:_GUEST]) for core, times in own.items()},
        )

    def idle_shares(self, earlier: "CoreTimes") -> dict[int, float]:
        """Return the share of the period since `earlier` that each core was idle, 0 to 1.

        The period should be a second or more, of which ticks are a small part.
        """
        shares = {}
        for core, total in self.total.items():
            period = total - earlier.total[core]
            shares[core] = (self.idle[core] - earlier.idle[core]) / period if period else 1.0
        return shares
