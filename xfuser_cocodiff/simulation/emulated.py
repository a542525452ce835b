"""Holds the simulator against steps that `cocodiff bench model` has measured on an emulated cluster.

Computation is what steps took there without communication; links are those that were asked for; the timeline and the
cost model are those of machines on paper. What a cluster has not is that ranks share the cores of one machine: those
that are through with what they compute send while others compute, and every message takes time from all of them.
Figures for that, and for gloo, are fitted to measured steps: those of gloo and of how much computation hides at most
at a share of 0.8, and prove themselves at the others; those of what links hide and of a coded call at shares up to
0.9, and prove themselves at 0.98; all of them at low resolution, and those that are not of codecs prove themselves at
high.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from xfuser_cocodiff.machine import planner
from xfuser_cocodiff.machine.plan import Plan
from xfuser_cocodiff.machine.profile import AxisLink, Profile
from xfuser_cocodiff.machine.topology import Topology
from xfuser_cocodiff.simulation.layer import layer_tasks
from xfuser_cocodiff.simulation.scenario import STOCK
from xfuser_cocodiff.simulation.timeline import makespan

CLOSE = 0.15
"""How far a simulated step may be off the measured one."""
_MEGABIT = 1e6 / 8
_VALUE_BYTES = 4
"""fp32."""
_TEXT_TOKENS = 64
"""That the transformer of `bench model` has beside those of its shape, padded to divide by the ranks."""
_MLP_PROJECTIONS = 8
"""The MLP of FLUX.1, in projections from width to width."""
_COLLECTIVE, _DIRECT = 1.55, 1.07
"""How many times longer links take than their bytes do: gloo's collective has the two directions of one take turns."""
_SHORT = 0.25
"""Of the bytes: with less, direct sends gain nothing."""
_HIDDEN_OF_LINKS, _MOST_OF_COMPUTATION = 0.7, 0.5
"""What goes on at one time, since ranks that take turns on cores send while others compute: so much of what links take,
and no more than so much of computation."""
CALL_SECONDS = 1.2e-3
"""Of a core, that an exchange by codecs takes a rank."""
_HEAD_GROUPS = re.compile(r"(\d+) head group")
"""In the words of a record for a schedule."""


@dataclass(frozen=True)
class Cell:
    """A mode at a share."""

    share: float
    """Of stock's step that its all-to-alls add."""
    mode: str
    measured: float
    """Seconds of a step, the median."""
    simulated: float

    @property
    def ratio(self) -> float:
        """Simulated over measured."""
        return self.simulated / self.measured

    @property
    def agrees(self) -> bool:
        """Whether the two are close."""
        return abs(self.ratio - 1) <= CLOSE


def held_against(record: Mapping[str, Any]) -> list[Cell]:
    """Every mode of a record of `cocodiff bench model`, beside what is simulated.

    Raises:
        ValueError: it is no such record, or one of rings or compiled graphs.
    """
    try:
        rows = record["rows"]
        if any(row["ring"] > 1 or row["compiled"] for row in rows):
            raise ValueError("its steps have a ring or are compiled, which is not simulated")
        return [
            Cell(row["share"], row["mode"], median(row["step_seconds"]), _Emulated(record, row).step_seconds)
            for row in rows
        ]
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a record of `cocodiff bench model`: {type(error).__name__} {error}") from None


class _Emulated:
    """A mode on an emulated cluster, as a record has it."""

    def __init__(self, record: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        self._topology, self._row = Topology.parse(record["topology"]), row
        self._shape, self._cores = record["shape"], record["host"]["cores"]
        self._rates = {axis: rate * row["scale"] * _MEGABIT for axis, rate in record["rates"].items()}
        self._is_coded = row["bytes_slow_fraction"] < 1
        self._is_short = row["bytes_slow_fraction"] < _SHORT

    def _profile(self) -> Profile:
        """Links that carry a share of the bytes take as long as ones that are as many times faster."""
        links = tuple(
            AxisLink(axis.name, 0.0, self._rate(axis.name, axis.size) / self._row["bytes_slow_fraction"])
            for axis in self._topology.axes
        )
        found = Profile(self._topology, links, 0.0, math.inf, math.inf, _COLLECTIVE)
        return found if self._is_short else replace(found, direct=replace(found, contention=_DIRECT))

    def _rate(self, axis: str, size: int) -> float:
        """That a rank sends at to all others along an axis: it has a link to each, but one to all other nodes."""
        return self._rates[axis] * (1 if axis == "node" else max(1, size - 1))

    @property
    def step_seconds(self) -> float:
        """Of a step."""
        row, depth = self._row, self._shape["depth"]
        profile, size = self._profile(), self._message_bytes
        plan = Plan.flat(self._topology) if row["mode"] == STOCK or self._is_short else planner.choose(profile, size)
        moving = planner.seconds(profile, plan, size)
        schedules = row["schedules"].values()
        v_first = any(schedule.startswith("V first") for schedule in schedules)
        coding = (2 + v_first) * CALL_SECONDS * self._topology.size / self._cores if self._is_coded else 0.0
        hiding = min(_MOST_OF_COMPUTATION, _HIDDEN_OF_LINKS * depth * 4 * moving / row["alone_seconds"])
        projection, attention = self._compute(1 - hiding)
        tasks = layer_tasks(
            projection=projection,
            mlp_projections=_MLP_PROJECTIONS,
            attention=attention,
            exchanges=dict.fromkeys("qkvo", moving),
            v_first=v_first,
            head_groups=max(map(int, _HEAD_GROUPS.findall(" ".join(schedules))), default=1),
        )
        return depth * (makespan(tasks) + coding)

    @property
    def _tokens(self) -> int:
        """Of the joint sequence."""
        return self._shape["tokens"] + math.ceil(_TEXT_TOKENS / self._topology.size) * self._topology.size

    @property
    def _message_bytes(self) -> float:
        """Of one of Q, K, V and O on a rank."""
        return self._tokens / self._topology.size * self._shape["width"] * _VALUE_BYTES

    def _compute(self, exposed: float) -> tuple[float, float]:
        """Seconds of a projection and of attention, of which a part shows: of a step without communication, by their
        FLOPs."""
        projection, attention = 2 * self._shape["width"], 4 * self._tokens  # for each value
        layer = exposed * self._row["alone_seconds"] / self._shape["depth"]
        whole = (4 + _MLP_PROJECTIONS) * projection + attention
        return layer * projection / whole, layer * attention / whole
