"""The probe on real ranks: what it finds is the same on all of them, and drives the planner."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from xfuser_cocodiff.engine.attention.reshard import reshard
from xfuser_cocodiff.engine.autotune import link_probe, plan_selection
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.policy import PlanPolicy
from xfuser_cocodiff.engine.comm.stages import Stages
from xfuser_cocodiff.engine.settings.config import CocoDiffConfig
from xfuser_cocodiff.engine.topology import planner
from xfuser_cocodiff.engine.topology.link_profile import AxisLink, Profile
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology

CPU = torch.device("cpu")


def measure(rank: int, text: str) -> Profile:
    link_probe._LAST_BYTES = 2**20  # more than in other tests, so that messages grow
    topology = Topology.parse(text, dist.get_world_size())
    mesh = Mesh.over(dist.group.WORLD, topology)
    profile = link_probe.measure(mesh, CPU)
    assert not mesh.traffic.calls  # what a probe sends is not the user's traffic
    return profile


def test_all_ranks_hold_the_same_valid_profile() -> None:
    first, *others = ranks.run(measure, 4, "2x2")
    assert all(other == first for other in others)
    assert Profile.from_json(first.to_json()) == first
    assert [link.name for link in first.links] == ["node", "gpu"]
    assert first.direct is not None  # gloo


def test_topologies_with_little_to_probe() -> None:
    for text in ("flat", "1x3"):
        [profile, *_] = ranks.run(measure, 3, text)
        assert Profile.from_json(profile.to_json()) == profile
        assert planner.choose_plan(profile, 1000).is_flat


def exchange_by(rank: int, profile: Profile | None, plan: str | None) -> tuple[list[str], dict]:
    """Stages that a small and a large exchange went through."""
    topology = Topology.parse("2x2", 4)
    config = CocoDiffConfig(topology=topology, plan=plan and Plan.parse(plan, topology), profile=profile)
    mesh = plan_selection.set_up_comm(dist.group.WORLD, config, CPU).mesh
    found = []
    for tokens in (1, 4096):
        tensor = torch.randn(1, 4, tokens, 4)
        there = reshard([tensor], 1, 2, mesh)
        assert torch.equal(reshard(there, 2, 1, mesh)[0], tensor)
        found.append(",".join(mesh.traffic.calls))
        mesh.traffic.reset()
    return found


def test_exchanges_follow_the_planner() -> None:
    topology = Topology.parse("2x2", 4)
    links = (AxisLink("node", 1e-3, 1e6), AxisLink("gpu", 1e-3, 1e6))
    profile = Profile(topology, links, 1e-5, 1e9, 1e9)
    assert ranks.run(exchange_by, 4, profile, None) == [["gpu,node", "flat"]] * 4
    swift = dataclasses.replace(profile, links=tuple(dataclasses.replace(link, latency_seconds=0) for link in links))
    assert ranks.run(exchange_by, 4, swift, None) == [["flat", "flat"]] * 4


def test_exchanges_follow_a_fixed_plan() -> None:
    assert ranks.run(exchange_by, 4, None, "hierarchical:node,gpu*") == [["node,gpu", "node,gpu"]] * 4


def test_without_a_profile_the_links_are_probed() -> None:
    results = ranks.run(exchange_by, 4, None, None)
    assert all(result == results[0] for result in results)


def test_on_an_accelerator_speeds_are_not_those_of_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many bytes, and several calls for each time that the host waits: else an axis as fast as the device would seem to
    be slow, or none."""
    from xfuser_cocodiff.engine.topology import devices as devices

    monkeypatch.setattr(devices, "capabilities", lambda device_type: devices.Capabilities())
    taken: list[tuple[int, int]] = []
    stages = Stages({(0,): None})
    measured = link_probe.Probe(Mesh(Topology.flat(2), stages, PlanPolicy(lambda size: None)), CPU)
    monkeypatch.setattr(measured, "_taken", lambda work, calls: taken.append(calls) or 1.0)
    assert measured._codec_speed() >= 2**26 and measured._copy_speed() >= 2**26  # bytes in a call of one second
    assert min(taken) > 1
