"""Process groups: one for each set of ranks, and how long its collectives may take."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

_subgroups: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]] = WeakKeyDictionary()
"""Groups of ranks of a world, for as long as that lives: communicators are dear and are never freed singly, so there is
one for each distinct set of ranks, whoever asks for it."""


def subgroup(group: dist.ProcessGroup, members: tuple[int, ...]) -> dist.ProcessGroup:
    """The group of some ranks of a group, by their global numbers; each of them must call this, in the same order among
    its groups. Others need not, so that Ulysses groups need not march in step."""
    if members == tuple(dist.get_process_group_ranks(group)):
        return group
    known = _subgroups.setdefault(dist.group.WORLD, {})
    if members not in known:
        options = None
        if dist.get_backend(group) == dist.Backend.NCCL:  # V is not to queue behind computation
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        with _unbound(dist.group.WORLD):
            known[members] = dist.new_group(members, pg_options=options, use_local_synchronization=True)
    return known[members]


@contextmanager
def _unbound(world: dist.ProcessGroup) -> Iterator[None]:
    """Make groups from nothing: NCCL's would be split off the world where a script has bound a device to it, and a
    split waits for all ranks of the world."""
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Let a collective of a group take so long and no longer, where the backend (gloo, NCCL) can be told."""
    dist.distributed_c10d._set_pg_timeout(timeout, group)
