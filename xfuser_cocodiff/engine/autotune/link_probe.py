"""The link probe: measures the link profile of a mesh.

Links are measured while all ranks communicate, as in an all-to-all. All figures are those of the slowest rank; all
ranks of the group get the same profile. Each figure takes a tenth of a second, or two on slow links.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from xfuser_cocodiff.engine.autotune.timing import time_calls
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.rank_results import gather_results
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.topology import devices
from xfuser_cocodiff.engine.topology.link_profile import AxisLink, Profile
from xfuser_cocodiff.engine.topology.planner import stage_cost
from xfuser_cocodiff.engine.topology.plans import Plan, Stage
from xfuser_cocodiff.engine.topology.topology import Axis

_PEER_BYTES = 64
"""Size of a tiny message to each peer, which shows the latency of a collective."""
_FIRST_BYTES, _LAST_BYTES, _GROWTH = 2**15, 2**26, 4
"""Smallest and largest message that may show the bandwidth, and the factor between sizes."""
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.005, 0.02
"""Bounds for the duration of a message that shows the bandwidth; between them, ten times that of a tiny one. Shorter
messages mislead, because links with token buckets let the first kilobytes pass unlimited; longer ones cost time."""
_SMALL_CALLS, _MAX_CALLS, ROUNDS = 3, 64, 4
"""Calls in a row of a tiny message, most calls in a row of a large one, and timed rounds."""
_SMALL_GROUP, _MAX_FACTOR = 8, 4
"""Number of ranks for which these calls are enough, and the largest factor for more."""
_COPIED_BYTES = {False: 2**20, True: 2**27}
"""Size by which copies are timed, by whether the device is asynchronous. On such a device, smaller sizes would show the
launch overhead, which is hidden while the host is ahead."""


class Sample(NamedTuple):
    """Timing of one stage."""

    small_seconds: float
    """Time of a tiny message."""
    more_bytes: int
    """Bytes by which a large message exceeds the tiny one."""
    more_seconds: float
    """Time by which the large message exceeds the tiny one."""


class Probe:
    """Measurement of the link profile of a mesh. All ranks must call its methods in the same order.

    Args:
        mesh: mesh with a process group for each axis of its topology and for all of them.
        device: device of the messages.
        host_group: ranks whose failure all ranks learn, in a group for host memory; those of the mesh when not given.
    """

    def __init__(self, mesh: Mesh, device: torch.device, host_group: dist.ProcessGroup | None = None) -> None:
        self.mesh, self.device = mesh.with_separate_traffic(), device
        # The mesh's own group of all ranks, because it has the mesh's timeout.
        self.group = mesh.stages.groups[Plan.flat(mesh.topology).stages[0]]
        self._host_group = host_group or self.group
        self._axes = tuple((dim,) if axis.size > 1 else None for dim, axis in enumerate(mesh.topology.axes))
        """Stage along each axis; None for axes of size 1."""

    def measure(self) -> Profile:
        """Measure and return the profile, without the codec.

        Raises:
            RankError: a rank cannot allocate or copy messages; on every rank, before the first collective.
        """
        copy_speed = min(gather_results(self._copy_speed, self._host_group, "link probe"))
        topology = self.mesh.topology
        samples = [self._sample(stage) if stage else None for stage in self._axes]
        flat = Plan.flat(topology).stages[0]
        flat_sample = self._sample(flat) if len(flat) > 1 else None
        least = devices.capabilities(self.device.type).collective_host_seconds
        launch = _launch_seconds(topology.shape, samples, flat_sample, least)
        links = tuple(_link(axis, sample, launch) for axis, sample in zip(topology.axes, samples, strict=True))
        profile = Profile(topology, links, launch, copy_speed, codec_bytes_per_second=0.0)
        if flat_sample is None:
            return profile
        predicted = stage_cost(profile, flat, flat_sample.more_bytes).wire
        return dataclasses.replace(profile, contention=flat_sample.more_seconds / predicted)

    def _sample(self, stage: Stage) -> Sample:
        """Time a tiny message, then larger ones until one takes long enough to show the bandwidth."""
        size = self.mesh.topology.size
        small = self._seconds(stage, _PEER_BYTES * size, _SMALL_CALLS)
        message, enough = _FIRST_BYTES, small + max(_SHORTEST_SECONDS, min(_LONGEST_SECONDS, 10 * small))
        # On slow links these messages take long: one call each, and more rounds for the one that is large enough.
        seconds = self._seconds(stage, message, 1, rounds=1)
        while seconds < enough and message < _LAST_BYTES:
            message *= _GROWTH
            seconds = self._seconds(stage, message, 1, rounds=1)
        # On fast links none is, and a single call may take twice as long as the next one: many calls in a row.
        calls = min(math.ceil(enough / seconds), _MAX_CALLS)
        seconds = min(seconds, self._seconds(stage, message, calls, rounds=ROUNDS - 1))
        return Sample(small, message - _PEER_BYTES * size, max(seconds - small, 1e-9))

    def _copy_speed(self) -> float:
        """Return the bytes per second at which this rank reorders a message between two stages."""
        size = self.mesh.topology.size
        block = _COPIED_BYTES[devices.capabilities(self.device.type).is_asynchronous] // size**2
        buffer = torch.empty(size, size, block, dtype=torch.uint8, device=self.device).transpose(0, 1)
        # It needs more memory than any message of the probe.
        return buffer.nbytes / min(time_calls(buffer.contiguous, _SMALL_CALLS, ROUNDS, None, self.device))

    def _seconds(self, stage: Stage, message_bytes: int, calls: int, rounds: int | None = None) -> float:
        """Return the time of a message along a stage; `rounds` is given if the stage is warmed up."""
        topology = self.mesh.topology
        peers = math.prod(topology.shape[dim] for dim in stage)
        message = torch.zeros(peers, max(1, message_bytes // peers), dtype=torch.uint8, device=self.device)
        plan = Plan(topology, (stage,))
        # Larger groups need more calls, since their barrier takes longer.
        calls *= min(max(1, topology.size // _SMALL_GROUP), _MAX_FACTOR)
        return self.fastest(lambda: self.mesh.stages.start(message, plan, 0)(), calls, rounds)

    def fastest(self, work: Callable[[], object], calls: int, rounds: int | None = None) -> float:
        """Return the seconds per call of a function on the slowest rank, in the fastest round.

        Args:
            work: function that every rank runs.
            calls: number of calls in a row.
            rounds: given if a similar function has just been timed.
        """
        options = {"group": self.group, "device": self.device, "is_warm": rounds is not None}
        seconds = self.mesh.comm_stream.run(
            lambda: time_calls(work, calls, rounds or ROUNDS, **options), Label("the link probe")
        )
        # The fastest round: the others were slowed down by other processes on the machine.
        return min(seconds)


def _link(axis: Axis, sample: Sample | None, launch: float) -> AxisLink:
    if sample is None:  # an axis of size 1
        return AxisLink(axis.name, 0.0, 1.0)
    peers = axis.size - 1
    return AxisLink(
        axis.name,
        latency_seconds=(sample.small_seconds - launch) / peers,
        bytes_per_second=sample.more_bytes * peers / axis.size / sample.more_seconds,
    )


def _launch_seconds(
    shape: tuple[int, ...], samples: list[Sample | None], flat_sample: Sample | None, least: float
) -> float:
    """Return the time of a collective without any peer, solved from the times of tiny messages.

    A collective along an axis of size s takes launch + (s - 1) latency. The flat collective takes launch once, and each
    axis' latency as often as there are peers whose outermost difference is on that axis. All but the launch time is
    measured. It is at least `least`, unless a tiny message takes less.
    """
    if flat_sample is None:
        return 0.0  # one axis: launch and latency cannot be told apart, and no plan depends on them
    inner, weights, weighted = 1, 0, 0.0
    for size, sample in zip(reversed(shape), reversed(samples), strict=True):
        if sample is not None:
            weights, weighted = weights + inner, weighted + inner * sample.small_seconds
        inner *= size
    smallest = min(sample.small_seconds for sample in samples if sample is not None)
    return min(max((weighted - flat_sample.small_seconds) / (weights - 1), least), 0.9 * smallest)
