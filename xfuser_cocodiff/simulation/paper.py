"""Holds the simulator against published figures: what agrees, what does not, and the likely reason.

Figures are those of the CoCoDiff paper (arXiv 2604.14561), partly from summaries of it, unless said otherwise. Its
means are read as being over the four models, the three resolutions and batches of 1 to 32 in powers of two; which of
them fit into memory is not known.
"""

import dataclasses
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from xfuser_cocodiff.machine import planner
from xfuser_cocodiff.machine.plan import Plan
from xfuser_cocodiff.simulation.layer import step
from xfuser_cocodiff.simulation.machines import AURORA, PCIE
from xfuser_cocodiff.simulation.scenario import MODES, STOCK, Mode, Scenario
from xfuser_cocodiff.simulation.workloads import WORKLOADS

RESOLUTIONS = (768, 1536, 2304)
BATCHES = (1, 2, 4, 8, 16, 32)
ONE_NODE, SEVERAL_NODES = (1,), (2, 4, 8)
CLOSE = 1.2
"""Two figures agree when neither is more than this many times the other."""
MEGABYTE, MILLISECOND = 1e6, 1e-3

INPAINTING = {
    ("SD3.5", "block"): (23.05, 22.77),
    ("SD3.5", "center"): (23.65, 21.95),
    ("Qwen-Image", "block"): (29.97, 29.17),
}
"""PSNR in dB against the truth, by model and mask: flat Ulysses, and CoCoDiff. Where a summary names no mask, it is
taken for the block."""


ABOUT, MORE, LESS = "about", "more than", "less than"


@dataclass(frozen=True)
class Finding:
    """A published figure beside the simulated one."""

    what: str
    published: float
    simulated: float
    relation: str = ABOUT
    """What was published: a figure, or that it is `MORE` or `LESS` than one."""
    fitted: bool = False
    """Whether the figure served to set the machine's contention: then it proves nothing."""
    reason: str = ""
    """Why the two likely differ, or what a reader must know."""

    @property
    def ratio(self) -> float:
        """Simulated over published."""
        return self.simulated / self.published

    @property
    def verdict(self) -> str:
        """'fitted', 'agrees' or 'differs'."""
        close = {ABOUT: 1 / CLOSE <= self.ratio <= CLOSE, MORE: self.ratio > 1, LESS: self.ratio < 1}
        return "fitted" if self.fitted else "agrees" if close[self.relation] else "differs"


def validate() -> list[Finding]:
    """All published figures that the simulator can be held against."""
    seconds = _seconds()
    return [*_collectives(), *_shares(seconds), *_one_node(seconds), *_several_nodes(seconds), *_others(seconds)]


Key = tuple[str, int, int, int, str]
"""Model, nodes, resolution, batch, mode."""


@dataclass(frozen=True)
class _Seconds:
    """Simulated steps, and the share of all-to-alls in them."""

    step: dict[Key, float]
    share: dict[Key, float]

    def gain(self, nodes: tuple[int, ...], mode: str, over: str = STOCK) -> float:
        """Mean of one mode's speed over another's."""
        return statistics.fmean(self.gains(nodes, mode, over).values())

    def gains(self, nodes: tuple[int, ...], mode: str, over: str = STOCK) -> dict[Key, float]:
        """The same by setting."""
        mine = {key: seconds for key, seconds in self.step.items() if key[1] in nodes and key[4] == mode}
        return {key: self.step[(*key[:4], over)] / seconds for key, seconds in mine.items()}


def _seconds() -> _Seconds:
    found = _Seconds({}, {})
    for nodes in ONE_NODE + SEVERAL_NODES:
        for workload in WORKLOADS.values():
            for resolution in RESOLUTIONS:
                for batch in BATCHES:
                    scenario = Scenario(AURORA, nodes, workload, resolution, batch)
                    for mode in (STOCK, "tapa", "tapa+vfirst", "paper"):
                        took, key = step(scenario, MODES[mode]), (workload.name, nodes, resolution, batch, mode)
                        found.step[key], found.share[key] = took.step, took.a2a / took.step
    return found


def _collectives() -> Iterator[Finding]:
    def milliseconds(rule: str, megabytes: float) -> float:
        profile = AURORA.profile(1, megabytes * MEGABYTE)
        return planner.seconds(profile, Plan.parse(rule, profile.topology), megabytes * MEGABYTE) / MILLISECOND

    def gain(megabytes: float) -> float:
        return milliseconds("flat", megabytes) / milliseconds("hierarchical", megabytes)

    yield Finding("oneCCL's all-to-all, 48 MB on 12 ranks, ms", 25.5, milliseconds("flat", 48), fitted=True)
    yield Finding(
        "TAPA, 48 MB on 12 ranks, ms",
        6.0,
        milliseconds("hierarchical", 48),
        reason="rests on reading Xe Link as 7.5 GB/s a tile; with all links at once it would be 0.9 ms",
    )
    yield Finding(
        "TAPA over oneCCL at 48 MB",
        3.9,
        gain(48),
        reason="follows from the two above; the paper's own times, 25.5 and 6.0 ms, make it 4.3",
    )
    yield Finding("TAPA over oneCCL at 24 MB", 3.0, gain(24), reason="interpolated between 6 and 48 MB")
    yield Finding("TAPA over oneCCL at 6 MB", 1.1, gain(6), fitted=True)


def _shares(seconds: _Seconds) -> Iterator[Finding]:
    shares = {key: share for key, share in seconds.share.items() if key[0] == "qwen-image" and key[4] == STOCK}
    yield Finding(
        "all-to-all share of Qwen-Image, highest",
        0.96,
        max(shares.values()),
        reason="0.96 would take compute at the tiles' very peak, or a flat all-to-all that gets slower beyond 48 MB",
    )
    yield Finding(
        "all-to-all share of Qwen-Image, lowest",
        0.64,
        min(shares.values()),
        reason="the lowest is at batch 1, where messages are below 6 MB and contention is least",
    )
    low, high = (
        statistics.fmean(share for key, share in shares.items() if key[2] == resolution)
        for resolution in (RESOLUTIONS[0], RESOLUTIONS[-1])
    )
    yield Finding(
        "its growth from 768 to 2304 px",
        1.0,
        high / low,
        MORE,
        reason="hardly grows: attention takes the square of the tokens; with messages, only their contention grows",
    )


def _one_node(seconds: _Seconds) -> Iterator[Finding]:
    yield Finding("TAPA, one node", 2.3, seconds.gain(ONE_NODE, "tapa"))
    yield Finding("CoCoDiff, one node", 2.5, seconds.gain(ONE_NODE, "paper"))
    yield Finding(
        "V-First, one node, gain in % ('little')",
        10,
        _percent(seconds.gain(ONE_NODE, "tapa+vfirst", "tapa")),
        LESS,
        reason="little is taken for less than 10 %",
    )


def _several_nodes(seconds: _Seconds) -> Iterator[Finding]:
    yield Finding("TAPA, 24-96 ranks", 2.2, seconds.gain(SEVERAL_NODES, "tapa"), fitted=True)
    yield Finding(
        "CoCoDiff, 24-96 ranks",
        5.1,
        seconds.gain(SEVERAL_NODES, "paper"),
        reason="5.1 needs 80 % or more of every step in all-to-alls; and see V-First and V-Major",
    )
    yield Finding(
        "V-First, 24-96 ranks, gain in %",
        30,
        _percent(seconds.gain(SEVERAL_NODES, "tapa+vfirst", "tapa")),
        reason="to hide V, a quarter of all exchanges, Q's and K's projections must last as long as its exchange does; "
        "the paper may also let V's phases run beside those of Q and K on other links",
    )
    yield Finding(
        "V-Major, 24-96 ranks",
        2.9,
        seconds.gain(SEVERAL_NODES, "paper", "tapa+vfirst"),
        reason="a share from 0 to 1 saves half of Q, K and V, at most 1.6 with O whole; 2.2 x 1.3 x 2.9 = 8.3 is not "
        "the paper's 5.1 either, but 2.2 x 1.3 = 2.9 is: the summaries may have given a cumulative figure",
    )
    eight = seconds.gain((8,), "paper")
    yield Finding(
        "CoCoDiff on 8 nodes over 4",
        1.0,
        eight / seconds.gain((4,), "paper"),
        LESS,
        reason="24 heads end Ulysses at two nodes, and messages get small; here gains shrink from 4 nodes on",
    )


def _others(seconds: _Seconds) -> Iterator[Finding]:
    gains = seconds.gains(ONE_NODE + SEVERAL_NODES, "paper")
    yield Finding("CoCoDiff, mean", 3.6, statistics.fmean(gains.values()), reason="as CoCoDiff, 24-96 ranks")
    there = max(gain for key, gain in gains.items() if key[:3] == ("sd3.5-large", 4, 2304))
    peak = max(gains, key=lambda key: gains[key])
    yield Finding(
        "CoCoDiff, peak: SD3.5, 2304 px, 4 nodes",
        8.4,
        there,
        reason="at 2304 px attention alone takes much of a step, and how the paper pads 38 heads is not known; "
        f"the peak here is {gains[peak]:.1f} with {peak[0]}, {peak[2]} px, {peak[1]} nodes, batch {peak[3]}",
    )
    pair = Scenario(dataclasses.replace(PCIE, inside=(("tile", 2),)), 1, WORKLOADS["flux.1-dev"], 1024)
    yield Finding(
        "V-First, FLUX.1-dev on two L20, gain in % (cache-dit)",
        4.8,
        _percent(step(pair, MODES[STOCK]).step / step(pair, Mode("flat", v_first=True)).step),
        reason="1024 px assumed; cache-dit hides parts of Q and O too",
    )


def _percent(gain: float) -> float:
    """A gain of 1.05 is one of 5 %."""
    return 100 * (gain - 1)
