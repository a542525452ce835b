"""How slowly a cell must run, so that the cores of this machine do not decide its times."""

import math
import os
from collections.abc import Iterable, Sequence

from xfuser_cocodiff.lab.accelerator.program import Program
from xfuser_cocodiff.lab.cluster_bench.cell import Cell
from xfuser_cocodiff.lab.cluster_bench.measurement import SLOWER, Speed
from xfuser_cocodiff.lab.emulation.dilation import MEGABIT
from xfuser_cocodiff.lab.emulation.links import MAX_RATE, MIN_RATE

_BYTE_SECONDS = 3.7e-9
"""CPU time per byte on an emulated link, both ends together; see :mod:`emulation.dilation`."""
_MESSAGE_SECONDS = 100e-6
"""CPU time per message, both ends together (assumed)."""
_BUSY_SHARE = 0.05
"""Share of the cores' time for which the dilation is chosen. Messages of a collective start together, so a step waits
for most of their CPU time: at 0.28, flat all-to-alls of 24 ranks took 20 to 27 % longer than predicted."""
_STEP_SECONDS = 1.6
"""Shortest recorded step in slow motion. Ranks delay it by some 20 ms, since they wait for cores that are idle most of
the time. At 0.8 s half of the times on 12 ranks were invalid: they differed by more than 3 % at 2 D."""
_MESSAGE_BYTES = 32768
"""Mean size of thinned messages. At 8192, headers of gloo and the collectives between steps are 2 % of the bytes."""
_MAX_THINNING = 64


def choose_speed(
    cell: Cell, programs: Iterable[Program], seconds: Sequence[float], repeats: int, dilation: float | None
) -> Speed:
    """Return dilation and thinning for some recorded steps.

    Args:
        cell: the cell.
        programs: recorded steps.
        seconds: predicted seconds of each, of the recorded blocks alone.
        repeats: number of runs of each.
        dilation: requested dilation, one of :func:`dilations`; None to choose it.
    """
    ranks, programs = cell.topology.size, list(programs)
    sent = [sum(program.sent_bytes(0).values()) for program in programs]
    messages = [sum(sum(size > 0 for size in each.sent[1:]) for each in program.collectives) for program in programs]
    thinning = min(_MAX_THINNING, sum(sent) / max(1, sum(messages)) / _MESSAGE_BYTES)
    slowest, fastest = _slowdowns(cell)
    if dilation is not None:
        return Speed(dilation, _within(thinning, slowest / dilation, fastest / dilation), repeats)
    thinning = max(1, round(thinning))
    cores = len(os.sched_getaffinity(0))
    needed = 1.0
    for size, count, step in zip(sent, messages, seconds, strict=True):
        busy = ranks * (size / thinning * _BYTE_SECONDS + count * _MESSAGE_SECONDS) / cores
        needed = max(needed, max(busy / _BUSY_SHARE, _STEP_SECONDS) / step)
    needed = max(slowest / thinning, min(fastest / thinning, float(f"{needed:.2g}")))
    return Speed(needed, thinning, repeats)


def dilations(cell: Cell) -> tuple[float, float]:
    """Return the lowest and highest dilation at which all links of a cell can be emulated."""
    lowest, highest = _slowdowns(cell)
    return lowest / _MAX_THINNING, highest


def _slowdowns(cell: Cell) -> tuple[float, float]:
    """Return the lowest and highest product of dilation and thinning that the links permit, also the slower one."""
    rates = [
        link.bytes_per_second / MEGABIT
        for axis, link in zip(cell.topology.axes, cell.profile.links, strict=True)
        if axis.size > 1
    ]
    return max(rates) / MAX_RATE, min(rates) / MIN_RATE / SLOWER


def _within(thinning: float, lowest: float, highest: float) -> int:
    return max(1, math.ceil(lowest), min(math.floor(highest), round(thinning)))
