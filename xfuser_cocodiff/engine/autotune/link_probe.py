"""The probe: measures what the planner needs to know of the links of a mesh.

Every figure is taken while all ranks communicate, since that is what an all-to-all does, and is that of the slowest
rank; all ranks of the group end up with the same profile. Each takes a tenth of a second or two on slow links.
"""

import dataclasses
import math
from collections.abc import Callable

import torch

from xfuser_cocodiff.engine.autotune.interleaved_timing import calls_per_sample, time_calls
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.compression.codecs import Codec, LinkReference, decode, encode
from xfuser_cocodiff.engine.topology import devices as devices
from xfuser_cocodiff.engine.topology.link_profile import AxisLink, Profile
from xfuser_cocodiff.engine.topology.planner import stage_cost
from xfuser_cocodiff.engine.topology.plans import Plan, Stage
from xfuser_cocodiff.engine.topology.topology import Axis

_PEER_BYTES = 64
"""Sent to each peer to see what a collective costs when there is next to nothing to send."""
_FIRST_BYTES, _LAST_BYTES, _GROWTH = 2**15, 2**26, 4
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.005, 0.02
"""A message is large enough when it takes ten times as long as a tiny one, within these bounds: much faster ones say
little, since links with token buckets let the first kilobytes pass unhindered, and slower ones only cost time."""
_SMALL_CALLS, ROUNDS = 3, 3
_CODEC = Codec(bits=2)
_COPIED_BYTES = {False: 2**20, True: 2**27}
_CODED_TOKENS, _CODED_CALLS = {False: 2**11, True: 2**18}, {False: 1, True: 8}
"""What copies and the codec are timed by, tokens of 128 values and calls in a row, by whether the device queues work.
There, less would show what it costs to launch kernels, which is hidden while the host is ahead."""

Sample = tuple[float, int, float]
"""One stage: seconds of a tiny message, and of how many more bytes in how many more seconds."""


def measure(mesh: Mesh, device: torch.device) -> Profile:
    """Measure the whole profile of a mesh. Every rank of the mesh must call this.

    Args:
        mesh: with a group for every axis of its topology and for all of them.
        device: where the tensors of the all-to-alls lie.
    """
    return Probe(mesh, device).measure()


class Probe:
    """The probe of a mesh. All ranks must call its methods in the same order.

    Args:
        mesh: with a group for every axis of its topology and for all of them.
        device: where the tensors of the all-to-alls lie.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self.mesh, self.device = mesh.with_separate_traffic(), device
        # The mesh's own group of all ranks, which has the mesh's timeout, as the caller's need not.
        self.group = mesh.stages.groups[Plan.flat(mesh.topology).stages[0]]
        self._axes = tuple((dim,) if axis.size > 1 else None for dim, axis in enumerate(mesh.topology.axes))
        """The stage along each axis; None where nothing moves."""

    def measure(self) -> Profile:
        """Return the profile."""
        speeds = self._copy_speed(), self._codec_speed()
        profile = self._along_axes(speeds, direct=False)
        if devices.capabilities(self.device.type).supports_direct_sends:
            # Only gloo's collective, which is that of the CPU, leaves something to gain by direct sends.
            return dataclasses.replace(profile, direct=self._along_axes(speeds, direct=True))
        return profile

    def _along_axes(self, speeds: tuple[float, float], direct: bool) -> Profile:
        """The profile of collectives, or of direct sends, given the speeds of copies and of the codec."""
        topology = self.mesh.topology
        axes = [self._sample(stage, direct) if stage else None for stage in self._axes]
        flat = Plan.flat(topology).stages[0]
        whole = self._sample(flat, direct) if len(flat) > 1 else None
        launch = _launch_seconds(topology.shape, axes, whole)
        links = tuple(_link(axis, sample, launch) for axis, sample in zip(topology.axes, axes, strict=True))
        profile = Profile(topology, links, launch, *speeds)
        if whole is None:
            return profile
        _, more_bytes, more_seconds = whole
        return dataclasses.replace(profile, contention=more_seconds / stage_cost(profile, flat, more_bytes).wire)

    def _sample(self, stage: Stage, direct: bool) -> Sample:
        """Small messages, then larger ones until they take long enough to show the bandwidth."""
        size = self.mesh.topology.size
        small = self._seconds(stage, direct, _PEER_BYTES * size, _SMALL_CALLS)
        message, enough = _FIRST_BYTES, small + max(_SHORTEST_SECONDS, min(_LONGEST_SECONDS, 10 * small))
        # On slow links it is these messages that take long: one call each, and more of the one that is long enough.
        taken = self._long_enough(stage, direct, message, enough)
        while taken < enough and message < _LAST_BYTES:
            message *= _GROWTH
            taken = self._long_enough(stage, direct, message, enough)
        return small, message - _PEER_BYTES * size, max(taken - small, 1e-9)

    def _long_enough(self, stage: Stage, direct: bool, message: int, enough: float) -> float:
        """Seconds of a message, taken with care where they are enough."""
        taken = self._seconds(stage, direct, message, 1, rounds=1)
        return taken if taken < enough else min(taken, self._seconds(stage, direct, message, 1, rounds=ROUNDS - 1))

    def _copy_speed(self) -> float:
        """Bytes per second at which a message is reordered between two stages."""
        size = self.mesh.topology.size
        share = _COPIED_BYTES[devices.capabilities(self.device.type).is_asynchronous] // size**2
        buffer = torch.empty(size, size, share, dtype=torch.uint8, device=self.device).transpose(0, 1)
        return buffer.nbytes / self._taken(lambda: buffer.contiguous(), _SMALL_CALLS)

    def _codec_speed(self) -> float:
        """Bytes of values per second that go through a codec: encoded here, and others decoded."""
        queues = devices.capabilities(self.device.type).is_asynchronous
        values = torch.randn(1, 1, 1, _CODED_TOKENS[queues], 2**7, device=self.device)
        values = values.to(torch.bfloat16) if queues else values
        target = torch.empty_like(values)
        payload = values.new_empty(1, _CODEC.payload_bytes(values.shape, values.dtype), dtype=torch.uint8)
        sent, received = LinkReference(), LinkReference()
        for reference in (sent, received):
            reference.advance(torch.zeros_like(values), keeps_change=False)

        def code() -> None:
            encode(values, sent, _CODEC, None, payload)
            decode(payload, received, _CODEC, None, target)

        return values.nbytes / self._taken(code, _CODED_CALLS[queues])

    def _seconds(self, stage: Stage, direct: bool, message_bytes: int, calls: int, rounds: int | None = None) -> float:
        """Of a message; with `rounds`, timed so often right after others along the same stage."""
        topology = self.mesh.topology
        peers = math.prod(topology.shape[dim] for dim in stage)
        message = torch.zeros(peers, max(1, message_bytes // peers), dtype=torch.uint8, device=self.device)
        plan, calls = Plan(topology, (stage,), direct=(direct,)), calls_per_sample(calls, topology.size)
        return self._taken(lambda: self.mesh.stages.start(message, plan, 0)(), calls, rounds)

    def _taken(self, work: Callable[[], object], calls: int, rounds: int | None = None) -> float:
        # The fastest: what others take longer is the time of something else on the machine.
        return min(time_calls(work, calls, rounds or ROUNDS, self.group, self.device, is_warm=rounds is not None))


def _link(axis: Axis, sample: Sample | None, launch: float) -> AxisLink:
    if sample is None:  # nobody to send to
        return AxisLink(axis.name, 0.0, 1.0)
    (small, more_bytes, more_seconds), peers = sample, axis.size - 1
    return AxisLink(
        axis.name,
        latency_seconds=(small - launch) / peers,
        bytes_per_second=more_bytes * peers / axis.size / more_seconds,
    )


def _launch_seconds(shape: tuple[int, ...], axes: list[Sample | None], whole: Sample | None) -> float:
    """Solve small messages for what a collective costs beside its peers.

    An axis of size s costs launch + (s - 1) latency. The flat collective costs launch once and each latency as often as
    there are peers that differ on that axis first; everything but the launch is measured.
    """
    if whole is None:
        return 0.0  # one axis: nothing tells launch and latency apart, and no plan depends on it
    inner, weights, weighted = 1, 0, 0.0
    for size, sample in zip(reversed(shape), reversed(axes), strict=True):
        if sample is not None:
            weights, weighted = weights + inner, weighted + inner * sample[0]
        inner *= size
    cheapest = min(sample[0] for sample in axes if sample is not None)
    return min(max((weighted - whole[0]) / (weights - 1), 0.0), 0.9 * cheapest)
