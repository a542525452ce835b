"""Timeouts of process groups."""

from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from xfuser_cocodiff.engine.comm import groups
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
