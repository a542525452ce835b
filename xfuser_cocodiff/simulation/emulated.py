"""Holds the simulator against steps that `cocodiff bench model` has measured on an emulated cluster.

Computation is what steps took there without all-to-alls, less what gloo takes to bring the output together; links are
those that were asked for; the timeline and the cost model are those of machines on paper. What a cluster has not is
that ranks share the cores of one machine: those that are through with what they compute send while others compute, and
every message takes time from all of them. Figures for that, and for gloo, are fitted to measured steps: those of gloo
to exact ones at a share of 0.8, and they prove themselves at the others; the rest to all of them.
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
from xfuser_cocodiff.machine.topology import FLAT, Topology
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
_OUTPUT_WIDTH = 64
"""Of what comes together at the end of a step, for each token of the shape."""
_MLP_PROJECTIONS = 8
"""The MLP of FLUX.1, in projections from width to width."""
_COLLECTIVE, _DIRECT = 1.55, 1.07
"""How many times longer links take than their bytes do: gloo's collective has the two directions of one take turns."""
_HIDDEN_OF_LINKS, _MOST_OF_COMPUTATION = 0.5, 0.5
"""What goes on at one time, since ranks that take turns on cores send while others compute: so much of what links take,
and no more than so much of computation."""
CALL_SECONDS = 2.4e-3
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
        self._topology, self._row = Topology.parse(record["topology"], record.get("ranks")), row
        self._shape, self._cores = record["shape"], record["host"]["cores"]
        self._rates = {axis: rate * row["scale"] * _MEGABIT for axis, rate in record["rates"].items()}
        self._is_coded = row["bytes_slow_fraction"] < 1
        self._computation = row["alone_seconds"] - self._gather(is_stocks=True)

    def _profile(self, share: float) -> Profile:
        """Links that carry a share of the bytes take as long as ones that are as many times faster."""

        def known(times_longer: float) -> Profile:
            axes = [(axis.name, self._rate(axis.name, axis.size)) for axis in self._topology.axes]
            links = tuple(AxisLink(name, 0.0, rate / share / times_longer) for name, rate in axes)
            return Profile(self._topology, links, 0.0, math.inf, math.inf)

        return replace(known(_COLLECTIVE), direct=known(_DIRECT))

    def _rate(self, axis: str, size: int) -> float:
        """That a rank sends at to all others along an axis: it has a link to each, but one to all other nodes, and one
        port where all links are alike."""
        return self._rates[axis] * (1 if axis in ("node", FLAT) else max(1, size - 1))

    @property
    def step_seconds(self) -> float:
        """Of a step."""
        row, depth = self._row, self._shape["depth"]
        profile, size = self._profile(row["bytes_slow_fraction"]), self._message_bytes
        plan = Plan.flat(self._topology) if row["mode"] == STOCK else planner.choose(profile, size)
        moving = planner.seconds(profile, plan, size)
        schedules = row["schedules"].values()
        v_first = any(schedule.startswith("V first") for schedule in schedules)
        coding = (2 + v_first) * CALL_SECONDS * self._topology.size / self._cores if self._is_coded else 0.0
        hiding = min(_MOST_OF_COMPUTATION, _HIDDEN_OF_LINKS * depth * 4 * moving / self._computation)
        projection, attention = self._compute(1 - hiding)
        tasks = layer_tasks(
            projection=projection,
            mlp_projections=_MLP_PROJECTIONS,
            attention=attention,
            exchanges=dict.fromkeys("qkvo", moving),
            v_first=v_first,
            head_groups=max(map(int, _HEAD_GROUPS.findall(" ".join(schedules))), default=1),
        )
        return depth * (makespan(tasks) + coding) + self._gather(row["mode"] == STOCK)

    def _gather(self, is_stocks: bool) -> float:
        """Seconds in which the output comes together: in gloo's ring, in which each link to a neighbour carries the
        blocks of all ranks but one, or as the planner has it. The ring goes one way, so that no two directions of a
        link take turns, as they do in gloo's all-to-all."""
        block = self._shape["tokens"] / self._topology.size * _OUTPUT_WIDTH * _VALUE_BYTES
        if is_stocks:
            return (self._topology.size - 1) * block / min(self._rates.values())
        profile = self._profile(1.0)
        return planner.gather_seconds(profile, planner.choose_gather(profile, block), block)

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
        layer = exposed * self._computation / self._shape["depth"]
        whole = (4 + _MLP_PROJECTIONS) * projection + attention
        return layer * projection / whole, layer * attention / whole
