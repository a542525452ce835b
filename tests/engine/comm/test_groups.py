"""Timeouts of process groups."""

from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from xfuser_cocodiff.engine.comm import groups
from xfuser_cocodiff.xdit.session import reductions

CPU = torch.device("cpu")


def timeouts(rank: int) -> list[float]:
    """Return the timeouts of a new group, after a change, and of an agreement on that group's device."""
    group = dist.new_group(timeout=timedelta(seconds=33))
    found = [groups.timeout_of(group, CPU)]
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=22), group)
    found.append(groups.timeout_of(group, CPU))
    sequence = SimpleNamespace(cpu_group=dist.group.WORLD, device_group=group)
    done = SimpleNamespace(wait=found.append)
    with (
        mock.patch("xfuser.core.distributed.get_sp_group", lambda: sequence),
        mock.patch.object(dist, "all_reduce", lambda *_, **__: done),
    ):
        reductions.all_reduce([1.0], "max")
        reductions.all_reduce([1.0], "max", timeout=44)
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
    """Return members and priority of the groups that NCCL would create."""
    options = []

    def record(members: tuple[int, ...], pg_options: SimpleNamespace, **_: object) -> object:
        options.append((members, pg_options.priority))
        return SimpleNamespace()

    def nccl_options(is_high_priority_stream: bool) -> SimpleNamespace:
        return SimpleNamespace(priority=is_high_priority_stream)

    world = dist.group.WORLD
    with (
        mock.patch.object(dist, "get_backend", lambda _: dist.Backend.NCCL),
        mock.patch.object(dist, "ProcessGroupNCCL", SimpleNamespace(Options=nccl_options), create=True),
        mock.patch.object(dist, "new_group", record),
    ):
        made = [groups.subgroup(world, members) for members in ((0, 1), (0,))]
        assert groups.subgroup(world, (0, 1)) is made[0], "created once"
    assert not any(group is world for group in made)
    return options


def test_nccl_groups_have_high_priority() -> None:
    """Also that of all ranks: in xDiT's own, V would queue behind the products of Q and K."""
    assert ranks.run(nccl_groups, 2) == [[((0, 1), True), ((0,), True)]] * 2


def gloo_groups(rank: int) -> tuple[bool, float]:
    """Return whether a group of all ranks is the world without a timeout, and the timeout of one that has one."""
    limited = groups.subgroup(dist.group.WORLD, (0, 1), timedelta(seconds=11))
    shared = groups.subgroup(dist.group.WORLD, (0, 1))
    return shared is dist.group.WORLD, groups.timeout_of(limited, CPU).total_seconds()


def test_gloo_shares_the_group_of_all_ranks_where_it_has_no_timeout() -> None:
    assert ranks.run(gloo_groups, 2) == [(True, 11)] * 2
