"""The link probe: measures the link profile of a mesh.

All figures are taken while all ranks communicate, as in an all-to-all, and are those of the slowest rank; all ranks of
the group get the same profile. Each figure takes a tenth of a second, or two on slow links.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from xfuser_cocodiff.engine.autotune.interleaved_timing import calls_per_sample, time_calls
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.compression.codec import Codec
from xfuser_cocodiff.engine.compression.codecs import CodedTensor, decode, encode
from xfuser_cocodiff.engine.compression.link_reference import ADAPTIVE, LinkReference
from xfuser_cocodiff.engine.compression.loopback import NUM_SLOTS, Loopback
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
_SMALL_CALLS, ROUNDS = 3, 3
_CODEC = Codec(bits=2)
_COPIED_BYTES = {False: 2**20, True: 2**27}
_CODED_TOKENS, _CODED_CALLS = {False: 2**11, True: 2**18}, {False: 1, True: 8}
"""Sizes by which copies and the codec are timed, and calls in a row, by whether the device is asynchronous; a token has
128 values. On such a device, smaller sizes would show the launch overhead, which is hidden while the host is ahead."""
_HOST_CODEC, _HOST_TOKENS, _HOST_CALLS = Codec(bits=2, predictor=ADAPTIVE), 2, 8
"""Codec whose host time is measured, tokens, so few that the host is the slower one, and calls in a row."""


class Sample(NamedTuple):
    """Timing of one stage."""

    small_seconds: float
    """Time of a tiny message."""
    more_bytes: int
    """Bytes by which a large message exceeds the tiny one."""
    more_seconds: float
    """Time by which the large message exceeds the tiny one."""


def measure(mesh: Mesh, device: torch.device) -> Profile:
    """Measure the link profile of a mesh; every rank of the mesh must call this.

    Args:
        mesh: mesh with a process group for each axis of its topology and for all of them.
        device: device of the messages.
    """
    return Probe(mesh, device).measure()


class Probe:
    """Measurement of the link profile of a mesh. All ranks must call its methods in the same order.

    Args:
        mesh: mesh with a process group for each axis of its topology and for all of them.
        device: device of the messages.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self.mesh, self.device = mesh.with_separate_traffic(), device
        # The mesh's own group of all ranks, because it has the mesh's timeout.
        self.group = mesh.stages.groups[Plan.flat(mesh.topology).stages[0]]
        self._axes = tuple((dim,) if axis.size > 1 else None for dim, axis in enumerate(mesh.topology.axes))
        """Stage along each axis; None for axes of size 1."""

    def measure(self) -> Profile:
        """Measure and return the profile."""
        speeds, host_seconds = (self._copy_speed(), self._codec_speed()), self._coding_host_seconds()
        return self._measure_links(speeds, host_seconds)

    def _measure_links(self, speeds: tuple[float, float], host_seconds: float) -> Profile:
        """Measure the profile, given speeds of copies and codec, and host time."""
        topology = self.mesh.topology
        samples = [self._sample(stage) if stage else None for stage in self._axes]
        flat = Plan.flat(topology).stages[0]
        flat_sample = self._sample(flat) if len(flat) > 1 else None
        least = devices.capabilities(self.device.type).collective_host_seconds
        launch = _launch_seconds(topology.shape, samples, flat_sample, least)
        links = tuple(_link(axis, sample, launch) for axis, sample in zip(topology.axes, samples, strict=True))
        profile = Profile(topology, links, launch, *speeds, coding_host_seconds=host_seconds)
        if flat_sample is None:
            return profile
        predicted = stage_cost(profile, flat, flat_sample.more_bytes).wire
        return dataclasses.replace(profile, contention=flat_sample.more_seconds / predicted)

    def _sample(self, stage: Stage) -> Sample:
        """Time a tiny message, then larger ones until one takes long enough to show the bandwidth."""
        size = self.mesh.topology.size
        small = self._seconds(stage, _PEER_BYTES * size, _SMALL_CALLS)
        message, enough = _FIRST_BYTES, small + max(_SHORTEST_SECONDS, min(_LONGEST_SECONDS, 10 * small))
        # On slow links these messages take long: one call each, and more calls for the one that is large enough.
        seconds = self._seconds_of_large(stage, message, enough)
        while seconds < enough and message < _LAST_BYTES:
            message *= _GROWTH
            seconds = self._seconds_of_large(stage, message, enough)
        return Sample(small, message - _PEER_BYTES * size, max(seconds - small, 1e-9))

    def _seconds_of_large(self, stage: Stage, message: int, enough: float) -> float:
        """Return the time of a message, from more rounds if it is large enough."""
        seconds = self._seconds(stage, message, 1, rounds=1)
        if seconds < enough:
            return seconds
        return min(seconds, self._seconds(stage, message, 1, rounds=ROUNDS - 1))

    def _copy_speed(self) -> float:
        """Return the bytes per second at which a message is reordered between two stages."""
        size = self.mesh.topology.size
        block = _COPIED_BYTES[devices.capabilities(self.device.type).is_asynchronous] // size**2
        buffer = torch.empty(size, size, block, dtype=torch.uint8, device=self.device).transpose(0, 1)
        return buffer.nbytes / self._fastest(lambda: buffer.contiguous(), _SMALL_CALLS)

    def _codec_speed(self) -> float:
        """Return the bytes per second, of original values, that a rank encodes while it decodes as many."""
        is_asynchronous = devices.capabilities(self.device.type).is_asynchronous
        values = torch.randn(1, 1, 1, _CODED_TOKENS[is_asynchronous], 2**7, device=self.device)
        values = values.to(torch.bfloat16) if is_asynchronous else values
        target = torch.empty_like(values)
        payload = values.new_empty(1, _CODEC.payload_bytes(values.shape, values.dtype), dtype=torch.uint8)
        sent, received = LinkReference(), LinkReference()
        for reference in (sent, received):
            reference.advance(torch.zeros_like(values), keeps_previous=False)
            if is_asynchronous:  # where kernels always divide by scales
                reference.channel_scales = torch.ones(1, 1, 2**7, device=self.device)

        def encode_and_decode() -> None:
            encode([CodedTensor(values, sent, _CODEC, None, payload)])
            decode([CodedTensor(target, received, _CODEC, None, payload)])

        return values.nbytes / self._fastest(encode_and_decode, _CODED_CALLS[is_asynchronous])

    def _coding_host_seconds(self) -> float:
        """Return the host time that encoding and decoding a tensor takes; 0 where the host itself computes."""
        if not devices.capabilities(self.device.type).is_asynchronous:
            return 0.0
        values = torch.randn(NUM_SLOTS, 1, 1, _HOST_TOKENS, 2**7, device=self.device).to(torch.bfloat16)
        layer, values_of, codecs = Loopback(), dict.fromkeys("qkvo", values), dict.fromkeys("qkvo", _HOST_CODEC)

        def code_layer() -> None:
            layer.send(values_of, codecs)

        code_layer()  # the keyframe that creates the references
        return self._fastest(code_layer, _HOST_CALLS) / len(values_of)

    def _seconds(self, stage: Stage, message_bytes: int, calls: int, rounds: int | None = None) -> float:
        """Return the time of a message along a stage; `rounds` is given if the stage is warmed up."""
        topology = self.mesh.topology
        peers = math.prod(topology.shape[dim] for dim in stage)
        message = torch.zeros(peers, max(1, message_bytes // peers), dtype=torch.uint8, device=self.device)
        plan, calls = Plan(topology, (stage,)), calls_per_sample(calls, topology.size)
        return self._fastest(lambda: self.mesh.stages.start(message, plan, 0)(), calls, rounds)

    def _fastest(self, work: Callable[[], object], calls: int, rounds: int | None = None) -> float:
        # The fastest round: the others were slowed down by other processes on the machine.
        return min(time_calls(work, calls, rounds or ROUNDS, self.group, self.device, is_warm=rounds is not None))


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
