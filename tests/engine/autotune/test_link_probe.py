"""The link probe on real ranks: the same profile on all of them, used by the planner."""

import dataclasses
import functools
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from xfuser_cocodiff.engine.attention.reshard import reshard
from xfuser_cocodiff.engine.autotune import comm_setup, link_probe, timing
from xfuser_cocodiff.engine.autotune.comm_config import CommConfig
from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.policy import PlanPolicy
from xfuser_cocodiff.engine.comm.rank_results import RankError
from xfuser_cocodiff.engine.comm.stages import Stages
from xfuser_cocodiff.engine.topology.link_profile import AxisLink, Profile
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.tools.probing import link_survey

CPU = torch.device("cpu")


def measure(rank: int, text: str) -> Profile:
    link_probe._LAST_BYTES = 2**20  # more than in other tests, so that messages grow
    topology = Topology.parse(text, dist.get_world_size())
    mesh = Mesh.over(dist.group.WORLD, topology)
    profile = link_survey.measure_profile(mesh, CPU)
    assert not mesh.traffic.calls  # messages of the probe are not counted
    return profile


def test_all_ranks_measure_the_same_valid_profile() -> None:
    first, *others = ranks.run(measure, 4, "2x2")
    assert all(other == first for other in others)
    assert Profile.from_json(first.to_json()) == first
    assert [link.name for link in first.links] == ["node", "gpu"]
    assert first.codec_bytes_per_second > 0
    assert first.coding_host_seconds == 0.0  # on a CPU it is part of the codec's speed


def stages_of(rank: int, profile: Profile | None, plan: str | None) -> tuple[list[str], dict]:
    """Return the stages of a small and of a large all-to-all."""
    topology = Topology.parse("2x2", 4)
    config = CommConfig(topology=topology, plan=plan and Plan.parse(plan, topology), profile=profile)
    mesh = comm_setup.set_up_comm(dist.group.WORLD, config, CPU).mesh
    stages = []
    for tokens in (1, 4096):
        tensor = torch.randn(1, 4, tokens, 4)
        by_heads = reshard([tensor], 1, 2, mesh)
        assert torch.equal(reshard(by_heads, 2, 1, mesh)[0], tensor)
        stages.append(",".join(mesh.traffic.calls))
        mesh.traffic.reset()
    return stages


def test_all_to_alls_follow_the_planner() -> None:
    topology = Topology.parse("2x2", 4)
    links = (AxisLink("node", 1e-3, 1e6), AxisLink("gpu", 1e-3, 1e6))
    profile = Profile(topology, links, 1e-5, 1e9, 1e9)
    assert ranks.run(stages_of, 4, profile, None) == [["gpu,node", "flat"]] * 4
    no_latency = dataclasses.replace(
        profile, links=tuple(dataclasses.replace(link, latency_seconds=0) for link in links)
    )
    assert ranks.run(stages_of, 4, no_latency, None) == [["flat", "flat"]] * 4


def test_without_a_profile_the_links_are_probed() -> None:
    results = ranks.run(stages_of, 4, None, None)
    assert all(result == results[0] for result in results)


def probe_of(topology: str) -> link_probe.Probe:
    """Return a probe without process groups."""
    parsed = Topology.parse(topology, math.prod(map(int, topology.split("x"))))
    flat = Plan.flat(parsed).stages[0]
    return link_probe.Probe(Mesh(parsed, Stages({flat: None}), PlanPolicy(())), CPU)


def test_links_have_the_bandwidth_and_latency_that_explain_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time messages by known links: only bytes for other ranks cross them, one latency for each other rank."""
    topology = Topology.parse("2x4", 8)
    real = {0: (5e-4, 1e8), 1: (1e-4, 1e9)}  # latency in seconds and bytes per second of the link along each dim
    launch = 2e-4
    probe = probe_of("2x4")

    def seconds(stage: tuple[int, ...], message: int, calls: int, rounds: int | None = None) -> float:
        if len(stage) > 1:  # to 3 ranks of the node and 4 of the other one, all at once
            return launch + 3 * real[1][0] + 4 * real[0][0] + message / 2 / real[0][1]
        [dim] = stage
        (latency, bandwidth), size = real[dim], topology.shape[dim]
        return launch + (size - 1) * latency + message * (size - 1) / size / bandwidth

    monkeypatch.setattr(probe, "_seconds", seconds)
    monkeypatch.setattr(probe, "_copy_speed", lambda: 1e9)
    profile = probe.measure()
    assert profile.launch_seconds == pytest.approx(launch, rel=0.05)
    for link, (latency, bandwidth) in zip(profile.links, real.values(), strict=True):
        assert link.latency_seconds == pytest.approx(latency, rel=0.05)
        assert link.bytes_per_second == pytest.approx(bandwidth, rel=0.01)


class NoisyLinks:
    """Links and clock of a simulated machine: ranks are apart unless a barrier joins them, the first message of a size
    allocates memory, and sometimes other traffic is in the way."""

    def __init__(self, bytes_per_second: float, seed: int) -> None:
        self.now, self._bytes_per_second, self._noise = 0.0, bytes_per_second, random.Random(seed)
        self._known: set[int] = set()
        self._skew = 0.0

    def start(self, message: torch.Tensor, plan: Plan, number: int) -> Callable[[], None]:
        peers = len(message) - 1
        seconds = 2e-5 + message.nbytes * peers / len(message) / self._bytes_per_second + self._skew
        seconds += 3e-3 * (message.nbytes not in self._known) + 1e-3 * (self._noise.random() < 0.02)
        self._known.add(message.nbytes)
        self._skew = 0.0

        def wait() -> None:
            self.now += seconds

        return wait

    def end_round(self, device: torch.device) -> None:
        self._skew = self._noise.uniform(0.0, 5e-3)

    def barrier(self, group: object, device: torch.device) -> None:
        self._skew = 0.0


def is_slow(gigabytes: float, seed: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether a probe finds a link of this bandwidth slow beside a codec of 400 GB/s."""
    links, probe = NoisyLinks(1e9 * gigabytes, seed), probe_of("2x4")
    probe.mesh = SimpleNamespace(topology=probe.mesh.topology, stages=links, comm_stream=probe.mesh.comm_stream)
    probe.group = object()
    monkeypatch.setattr(timing, "gather", lambda values, group: values[None])
    monkeypatch.setattr(timing, "_synchronize", links.end_round)
    monkeypatch.setattr(timing, "barrier", links.barrier)
    without_memory = functools.partial(torch.empty, dtype=torch.uint8, device="meta")
    monkeypatch.setattr(link_probe.torch, "zeros", lambda *sizes, **_: without_memory(sizes))
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: links.now))
    monkeypatch.setattr(probe, "_copy_speed", lambda: 1e12)
    profile = probe.measure()
    assert links.now < 1, "seconds of a probe"
    return profile.with_codec(4e11, 0.0).slow_axes == ("node", "gpu")


@pytest.mark.parametrize(("gigabytes", "expected"), [(46, False), (37, True)])
def test_noise_does_not_change_which_links_are_slow(
    gigabytes: float, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link of 400 Gbit/s carries 46 GB/s; its largest message takes a millisecond, less than ranks are apart."""
    assert [is_slow(gigabytes, seed, monkeypatch) for seed in range(60)] == [expected] * 60


def failing_probe(rank: int) -> Profile:
    mesh = Mesh.over(dist.group.WORLD, Topology.flat(2))
    if rank == 1:
        link_probe._COPIED_BYTES = {False: 2**60}
    return link_probe.Probe(mesh, CPU).measure()


def test_failure_of_one_rank_is_the_error_of_all() -> None:
    """None is left in a collective."""
    for result in ranks.outcomes(failing_probe, 2):
        assert isinstance(result, RankError) and "link probe failed on 1 of 2 ranks (rank 1: " in str(result)


def test_links_are_measured_without_the_codec() -> None:
    for profile in ranks.run(measure_without_codec, 2):
        assert profile.codec_bytes_per_second == 0 and profile.slow_axes == ()
        assert Profile.from_json(profile.to_json()) == profile


def measure_without_codec(rank: int) -> Profile:
    with mock.patch.object(kernels, "_kernels", side_effect=AssertionError):
        return link_probe.Probe(Mesh.over(dist.group.WORLD, Topology.parse("2x1", 2)), CPU).measure()
