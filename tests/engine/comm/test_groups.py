"""Timeouts of process groups."""

from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from xfuser_cocodiff.engine.autotune import plan_selection
from xfuser_cocodiff.engine.comm import groups
from xfuser_cocodiff.engine.comm import mesh as mesh_module
from xfuser_cocodiff.engine.compression import axis_partition
from xfuser_cocodiff.engine.settings.config import resolve
from xfuser_cocodiff.engine.settings.ring_placement import SequenceRanks
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.session import session

CPU = torch.device("cpu")


def timeouts(rank: int) -> list[float]:
    """Return the timeouts of a new group, after a change, and of an agreement on that group's device."""
    group = dist.new_group(timeout=timedelta(seconds=33))
    found = [groups.timeout_of(group, CPU)]
    groups.set_timeout(group, timedelta(seconds=22))
    found.append(groups.timeout_of(group, CPU))
    sequence = SimpleNamespace(cpu_group=dist.group.WORLD, device_group=group)
    done = SimpleNamespace(wait=found.append)
    with (
        mock.patch("xfuser.core.distributed.get_sp_group", lambda: sequence),
        mock.patch.object(dist, "all_reduce", lambda *_, **__: done),
    ):
        session.all_reduce([1.0], "max")
        session.all_reduce([1.0], "max", timeout=44)
    return [each.total_seconds() for each in found]


def test_timeouts_are_those_of_the_backend_and_agreements_take_no_longer() -> None:
    assert ranks.run(timeouts, 2) == [[33, 22, 22, 44]] * 2


@pytest.mark.parametrize(("device", "seconds"), [("cuda", 600), ("xpu", 1800), ("cpu", 1800)])
def test_backends_without_options_have_the_default_of_the_device(
    monkeypatch: pytest.MonkeyPatch, device: str, seconds: float
) -> None:
    """NCCL's default is shorter than that of other backends."""
    monkeypatch.setattr(groups, "default_pg_nccl_timeout", timedelta(minutes=10))
    group = SimpleNamespace(_get_backend=lambda device: SimpleNamespace())
    assert groups.timeout_of(group, torch.device(device)).total_seconds() == seconds


def nccl_groups(rank: int) -> list[tuple]:
    """Return members, priority, CTAs and timeout of groups that NCCL would create, and whether each is the world."""
    options = []

    def record(members: tuple[int, ...], pg_options: SimpleNamespace, **_: object) -> object:
        options.append((members, pg_options.priority, getattr(pg_options.config, "max_ctas", None)))
        return SimpleNamespace()

    def nccl_options(is_high_priority_stream: bool) -> SimpleNamespace:
        return SimpleNamespace(priority=is_high_priority_stream, config=SimpleNamespace())

    world = dist.group.WORLD
    with (
        mock.patch.object(dist, "get_backend", lambda _: dist.Backend.NCCL),
        mock.patch.object(dist, "ProcessGroupNCCL", SimpleNamespace(Options=nccl_options), create=True),
        mock.patch.object(dist, "new_group", record),
    ):
        made = [groups.subgroup(world, members, None, ctas) for members in ((0, 1), (0,)) for ctas in (None, 4)]
        assert groups.subgroup(world, (0, 1)) is made[0], "created once"
    assert not any(group is world for group in made)
    return options


def test_nccl_groups_have_high_priority_and_limited_ctas() -> None:
    """Also that of all ranks: in xDiT's own, V would queue behind the products of Q and K."""
    expected = [((0, 1), True, None), ((0, 1), True, 4), ((0,), True, None), ((0,), True, 4)]
    assert ranks.run(nccl_groups, 2) == [expected] * 2


def gloo_groups(rank: int) -> tuple[bool, float]:
    """Return whether a group of all ranks is the world without a timeout, and the timeout of one that has one."""
    limited = groups.subgroup(dist.group.WORLD, (0, 1), timedelta(seconds=11))
    shared = groups.subgroup(dist.group.WORLD, (0, 1), None, 4)
    return shared is dist.group.WORLD, groups.timeout_of(limited, CPU).total_seconds()


def test_gloo_shares_the_group_of_all_ranks_where_it_has_no_timeout() -> None:
    assert ranks.run(gloo_groups, 2) == [(True, 11)] * 2


def ctas_of_a_mesh(rank: int) -> set[tuple]:
    """Return members and CTAs of the groups of a mesh and of its slow and fast axes."""
    asked, topology = set(), Topology.parse("2x2")

    def subgroup(group: dist.ProcessGroup, members: tuple[int, ...], timeout: object, ctas: int | None) -> object:
        asked.add((members, ctas))
        return original(group, members, timeout, ctas)

    original = groups.subgroup
    with mock.patch.object(mesh_module, "subgroup", subgroup), mock.patch.object(axis_partition, "subgroup", subgroup):
        config = resolve(
            {"use_cocodiff": True, "cocodiff_mode": "fast", "cocodiff_max_ctas": "3", "cocodiff_a2a": "flat"},
            {},
            SequenceRanks(4, topology),
        )
        plan_selection.set_up_comm(dist.group.WORLD, config, CPU)
    return asked


def test_all_groups_of_a_session_have_the_ctas_of_the_settings() -> None:
    for asked in ranks.run(ctas_of_a_mesh, 4):
        assert len(asked) >= 3
        assert {ctas for _, ctas in asked} == {3}
