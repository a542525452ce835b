"""Process groups: one for each set of ranks, and how long its collectives may take."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_nccl_timeout

_Made = dict[tuple[tuple[int, ...], timedelta | None], dist.ProcessGroup]
_made: WeakKeyDictionary[dist.ProcessGroup, _Made] = WeakKeyDictionary()
"""Groups of ranks of a world, by members and timeout, for as long as that lives: communicators are dear and are never
freed singly, so there is one for each, whoever asks for it."""


def subgroup(group: dist.ProcessGroup, members: tuple[int, ...], timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Return the group of some ranks of a group.

    Each of the members must call this, in the same order among its groups. Others need not, so that Ulysses groups need
    not march in step. All members with no timeout of their own are the group itself; its timeout stays what it is.

    Args:
        group: which they are in.
        members: by their global numbers.
        timeout: how long a collective of theirs may take; the backend's default when not given.
    """
    known = _made.setdefault(dist.group.WORLD, {})
    if (members, timeout) in known:
        return known[members, timeout]
    if timeout is None and members == tuple(dist.get_process_group_ranks(group)):
        return group
    options = None
    if dist.get_backend(group) == dist.Backend.NCCL:  # V is not to queue behind computation
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timeout or default_pg_nccl_timeout  # or PyTorch warns that the argument overrides it
    with _unbound(dist.group.WORLD):
        made = dist.new_group(members, timeout=timeout, pg_options=options, use_local_synchronization=True)
    known[members, timeout] = made
    return made


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
