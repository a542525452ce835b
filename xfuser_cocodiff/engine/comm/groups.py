"""Process groups: one per set of ranks and timeout, cached."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_nccl_timeout, default_pg_timeout

_Groups = dict[tuple[tuple[int, ...], timedelta | None], dist.ProcessGroup]
_groups: WeakKeyDictionary[dist.ProcessGroup, _Groups] = WeakKeyDictionary()
"""Groups by members and timeout, for each world as long as it lives. Communicators are expensive and never freed one by
one, so each is created once and shared."""


def subgroup(
    group: dist.ProcessGroup,
    members: tuple[int, ...],
    timeout: timedelta | None = None,
) -> dist.ProcessGroup:
    """Return the process group of some ranks of a group, created on first use.

    Every member must call this, in the same order among its groups. Other ranks need not, so that Ulysses groups can
    proceed independently. For all members of `group` and no timeout the result is `group` itself, except with NCCL:
    there every group has a communicator of its own, whose stream has a high priority. In xDiT's, V would queue behind
    the products that compute Q and K.

    Args:
        group: group that contains the members.
        members: global ranks.
        timeout: timeout of a collective; the backend's default when not given.
    """
    cached = _groups.setdefault(dist.group.WORLD, {})
    if (members, timeout) in cached:
        return cached[members, timeout]
    has_nccl = dist.get_backend(group) == dist.Backend.NCCL
    if timeout is None and not has_nccl and members == tuple(dist.get_process_group_ranks(group)):
        return group
    options = _nccl_options(timeout) if has_nccl else None
    with _unbound_device(dist.group.WORLD):
        created = dist.new_group(members, timeout=timeout, pg_options=options, use_local_synchronization=True)
    cached[members, timeout] = created
    return created


def _nccl_options(timeout: timedelta | None) -> "dist.ProcessGroupNCCL.Options":
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # before computation that is queued
    options._timeout = timeout or default_pg_nccl_timeout  # else PyTorch warns that the argument overrides it
    return options


@contextmanager
def _unbound_device(world: dist.ProcessGroup) -> Iterator[None]:
    """Unbind the world's device while groups are created.

    With a bound device NCCL splits new groups off the world, and a split waits for all ranks of the world.
    """
    device, world.bound_device_id = world.bound_device_id, None
    try:
        yield
    finally:
        world.bound_device_id = device


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return the time after which a group's backend fails a collective of tensors on a device."""
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):  # a backend without options, or none for the device
        return (default_pg_nccl_timeout if device.type == "cuda" else None) or default_pg_timeout
