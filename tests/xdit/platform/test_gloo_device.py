"""Groups of a process share one gloo device: one thread wakes for all, and no message is taken for another group's."""

import functools
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import ranks

WORLD, GROUPS = 3, 8


def awake() -> set[str]:
    """Threads of this process that wake again and again while it does nothing."""
    before, _, after = switches(), time.sleep(0.5), switches()
    return {thread for thread in before.keys() & after.keys() if after[thread] - before[thread] > 4}


def switches() -> dict[str, int]:
    """How often each thread has gone to sleep so far."""
    found = {}
    for thread in Path("/proc/self/task").iterdir():
        lines = dict(line.split(":", 1) for line in (thread / "status").read_text().splitlines())
        found[thread.name] = int(lines["voluntary_ctxt_switches"])
    return found


def exchange_in_all(rank: int) -> tuple[set[str], set[str], list[bool]]:
    """Who is awake before there are groups and after, and whether each group brings what its ranks gave it, when all
    are busy at once and each rank begins with another one."""
    import xfuser  # noqa: F401 (with it comes the plugin)

    before = awake()
    groups = [dist.new_group(list(range(WORLD)), backend=backend) for backend in ["gloo", None] * (GROUPS // 2)]
    dist.barrier()  # or their first messages are seen as well
    after = awake()
    sent = [torch.arange(50_000 * WORLD) + 1000 * number + rank for number in range(GROUPS)]
    received = [torch.empty_like(each) for each in sent]
    order = [(number + 3 * rank) % GROUPS for number in range(GROUPS)]
    works = [dist.all_to_all_single(received[n], sent[n], group=groups[n], async_op=True) for n in order]
    for work in works:
        work.wait()
    mine = torch.arange(50_000) + 50_000 * rank
    expected = [torch.cat([mine + 1000 * number + peer for peer in range(WORLD)]) for number in range(GROUPS)]
    return before, after, [torch.equal(*pair) for pair in zip(received, expected, strict=True)]


def test_one_thread_wakes_for_all_groups() -> None:
    for before, after, are_right in ranks.run(exchange_in_all, WORLD):
        assert before  # the world's
        assert after == before
        assert are_right == [True] * GROUPS


def make_one_elsewhere(rank: int) -> tuple[int, int]:
    """How many more are awake after a group was made without the plugin, and what that brings."""
    import xfuser  # noqa: F401

    import xfuser_cocodiff

    xfuser_cocodiff.uninstall()
    before = awake()
    group = dist.new_group([0, 1])
    given = torch.ones(1)
    dist.all_reduce(given, group=group)
    return len(awake() - before), int(given)


def test_pytorch_has_its_own_way_again_without_the_plugin() -> None:
    assert ranks.run(make_one_elsewhere, 2) == [(1, 2), (1, 2)]


def make_with(rank: int, **more: bool) -> list[tuple[bool, dict[str, bool]]]:
    """Whether a backend is given options that name devices, and what else, where PyTorch gives more to it than here."""
    from xfuser_cocodiff.xdit.platform import gloo_device

    seen = []

    class Later(dist.ProcessGroupGloo):
        def __init__(self, store: dist.Store, rank: int, size: int, *options: Any, **other: Any) -> None:
            rest = [other.pop("timeout")] if "timeout" in other else options
            seen.append((bool(options), other))
            super().__init__(store, rank, size, *rest)

    world = dist.group.WORLD._get_backend(torch.device("cpu"))
    with mock.patch.object(dist, "ProcessGroupGloo", Later):
        gloo_device._beside(world)(dist.HashStore(), 0, 1, timeout=timedelta(seconds=60), **more)
    return seen


@pytest.mark.parametrize(("more", "shared"), [({}, True), ({"begins_later": True}, False)])
def test_what_a_later_pytorch_asks_of_a_group_goes_before_its_device(more: dict[str, bool], shared: bool) -> None:
    [seen] = ranks.run(functools.partial(make_with, **more), 1)
    assert seen == [(shared, more)]


def make_without_options(rank: int) -> int:
    """What a group brings where PyTorch has other names for what devices are shared by."""
    import xfuser  # noqa: F401

    del dist.ProcessGroupGloo._Options
    given = torch.ones(1)
    dist.all_reduce(given, group=dist.new_group([0, 1]))
    return int(given)


def test_groups_are_made_where_private_names_have_moved() -> None:
    assert ranks.run(make_without_options, 2) == [2, 2]
