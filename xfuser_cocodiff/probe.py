"""The probe: measures what the planner needs to know of the links of a mesh, in well under a second.

Every figure is taken while all ranks communicate, since that is what an all-to-all does, and is that of the slowest
rank; all ranks of the group end up with the same profile.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from xfuser_cocodiff.codec import Codec, Reference, decode, encode
from xfuser_cocodiff.collectives import Mesh
from xfuser_cocodiff.plan import Plan, Stage
from xfuser_cocodiff.planner import stage_cost
from xfuser_cocodiff.profile import AxisLink, Profile
from xfuser_cocodiff.stopwatch import race
from xfuser_cocodiff.topology import Axis
from xfuser_cocodiff.traffic import Label, Traffic

_PEER_BYTES = 64
"""Sent to each peer to see what a collective costs when there is next to nothing to send."""
_FIRST_BYTES, _LAST_BYTES, _GROWTH = 2**14, 2**26, 4
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.005, 0.02
"""A message is large enough when it takes ten times as long as a tiny one, within these bounds: much faster ones say
little, since links with token buckets let the first kilobytes pass unhindered, and slower ones only cost time."""
_SMALL_CALLS, _ROUNDS = 3, 3
_LABEL = Label("probe")
_SQUARE = 512
"""Side of the matrices that are multiplied while a message travels."""


_CODEC = Codec(bits=2)


@dataclass(frozen=True)
class _Sample:
    """One stage: seconds of a tiny message, and of how many more bytes in how many more seconds."""

    small: float
    more_bytes: int
    more_seconds: float


def measure(mesh: Mesh, group: dist.ProcessGroup, device: torch.device) -> Profile:
    """Measure the profile of a mesh. Every rank of the group must call this.

    Args:
        mesh: made over `group`, with a group for every axis of its topology and for all of them.
        group: all ranks of the mesh.
        device: where the tensors of the all-to-alls lie.
    """
    probe = _Probe(dataclasses.replace(mesh, traffic=Traffic()), group, device)
    profile = _profile(probe, direct=False)
    if device.type == "cpu":
        # Only gloo's collective, which is that of the CPU, leaves something to gain by direct sends.
        return dataclasses.replace(profile, direct=_profile(probe, direct=True))
    # What overlaps on a CPU, layers find out by trying; on an accelerator the host does not see how long they take.
    return dataclasses.replace(profile, overlap=probe.overlap() if mesh.topology.levels else None)


def _profile(probe: "_Probe", direct: bool) -> Profile:
    topology = probe.mesh.topology
    axes = [probe.sample((dim,), direct) if axis.size > 1 else None for dim, axis in enumerate(topology.axes)]
    flat = Plan.flat(topology).stages[0]
    whole = probe.sample(flat, direct) if len(flat) > 1 else None
    launch = _launch_seconds(topology.shape, axes, whole)
    links = tuple(_link(axis, sample, launch) for axis, sample in zip(topology.axes, axes, strict=True))
    profile = Profile(topology, links, launch, probe.copy_speed(), probe.codec_speed())
    if whole is None:
        return profile
    expected = stage_cost(profile, flat, whole.more_bytes).wire
    return dataclasses.replace(profile, contention=whole.more_seconds / expected)


def _link(axis: Axis, sample: _Sample | None, launch: float) -> AxisLink:
    if sample is None:  # nobody to send to
        return AxisLink(axis.name, 0.0, 1.0)
    peers = axis.size - 1
    return AxisLink(
        axis.name,
        latency_seconds=(sample.small - launch) / peers,
        bytes_per_second=sample.more_bytes * peers / axis.size / sample.more_seconds,
    )


def _launch_seconds(shape: tuple[int, ...], axes: list[_Sample | None], whole: _Sample | None) -> float:
    """Solve small messages for what a collective costs beside its peers.

    An axis of size s costs launch + (s - 1) latency. The flat collective costs launch once and each latency as often as
    there are peers that differ on that axis first; everything but the launch is measured.
    """
    if whole is None:
        return 0.0  # one axis: nothing tells launch and latency apart, and no plan depends on it
    inner, weights, weighted = 1, 0, 0.0
    for size, sample in zip(reversed(shape), reversed(axes), strict=True):
        if sample is not None:
            weights, weighted = weights + inner, weighted + inner * sample.small
        inner *= size
    cheapest = min(sample.small for sample in axes if sample is not None)
    return min(max((weighted - whole.small) / (weights - 1), 0.0), 0.9 * cheapest)


class _Probe:
    """Takes times on all ranks and lets them agree on the slowest."""

    def __init__(self, mesh: Mesh, group: dist.ProcessGroup, device: torch.device) -> None:
        self.mesh, self.group, self.device = mesh, group, device

    def sample(self, stage: Stage, direct: bool) -> _Sample:
        """Small messages, then larger ones until they take long enough to show the bandwidth."""
        size = self.mesh.topology.size
        small = self._seconds(stage, direct, _PEER_BYTES * size, _SMALL_CALLS)
        message, enough = _FIRST_BYTES, small + max(_SHORTEST_SECONDS, min(_LONGEST_SECONDS, 10 * small))
        while (taken := self._seconds(stage, direct, message, 1)) < enough and message < _LAST_BYTES:
            message *= _GROWTH
        more = message - _PEER_BYTES * size
        return _Sample(small, more, max(taken - small, 1e-9))

    def copy_speed(self) -> float:
        """Bytes per second at which a message is reordered between two stages."""
        size = self.mesh.topology.size
        buffer = torch.empty(size, size, 2**20 // size**2, dtype=torch.uint8, device=self.device).transpose(0, 1)
        return buffer.nbytes / self._taken(lambda: buffer.contiguous(), _SMALL_CALLS)

    def codec_speed(self) -> float:
        """Bytes of values per second that go through a codec: coded here, and others decoded."""
        values = torch.randn(1, 1, 1, 2**11, 2**7, device=self.device)
        target = torch.empty_like(values)
        payload = values.new_empty(1, _CODEC.payload_bytes(values.shape, values.dtype), dtype=torch.uint8)
        sent, received = Reference(), Reference()
        for reference in (sent, received):
            reference.advance(torch.zeros_like(values), keeps_change=False)

        def code() -> None:
            encode(values, sent, _CODEC, None, payload)
            decode(payload, received, _CODEC, None, target)

        return values.nbytes / self._taken(code, 1)

    def overlap(self) -> float:
        """Share of an exchange that hides behind computation: both at once against each alone.

        It is 0 where an exchange holds up the host or the device until it is done, as under oneCCL's CCL_OP_SYNC=1. It
        goes by axis, as the one of V may, and is as long as a flat one that shows the bandwidth.
        """
        topology = self.mesh.topology
        plan = Plan.hierarchical(topology)
        share = self.sample(Plan.flat(topology).stages[0], False).more_bytes // topology.size
        message = torch.zeros(*plan.shape, share, dtype=torch.uint8, device=self.device)
        square = torch.randn(_SQUARE, _SQUARE, device=self.device)

        def compute(times: int) -> None:
            for _ in range(times):
                torch.mm(square, square)

        def both(times: int) -> None:
            handle = self.mesh.post(message, plan, _LABEL, lambda received: received)
            compute(times)
            handle.wait()

        exchange = self._taken(lambda: both(0), 1)
        times = max(1, round(exchange / self._taken(lambda: compute(_SMALL_CALLS), 1) * _SMALL_CALLS))
        computation, together = (self._taken(functools.partial(work, times), 1) for work in (compute, both))
        hidden = (exchange + computation - together) / min(exchange, computation)
        return min(max(hidden, 0.0), 1.0)

    def _seconds(self, stage: Stage, direct: bool, message_bytes: int, calls: int) -> float:
        topology = self.mesh.topology
        peers = math.prod(topology.shape[dim] for dim in stage)
        message = torch.zeros(peers, max(1, message_bytes // peers), dtype=torch.uint8, device=self.device)
        plan = Plan(topology, (stage,), direct=(direct,))
        return self._taken(lambda: self.mesh.finish(self.mesh.start(message, plan, 0)), calls)

    def _taken(self, work: Callable[[], object], calls: int) -> float:
        race([work], 1, 1, self.group, self.device)  # opens connections and allocates
        # The fastest: what others take longer is the time of something else on the machine.
        return min(race([work], calls, _ROUNDS, self.group, self.device)[0])
