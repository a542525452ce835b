"""Reductions over all ranks that share a sequence, by which they agree on decisions.

In a ring these are all of its Ulysses groups, which have to make the same decisions. The collectives run in xDiT's gloo
group for host memory, so that they wait for no device and no all-to-all in flight.
"""

import zlib
from datetime import timedelta

import torch
import torch.distributed as dist

from xfuser_cocodiff.engine.comm import failure_detection
from xfuser_cocodiff.engine.comm.groups import timeout_of
from xfuser_cocodiff.engine.topology import devices
from xfuser_cocodiff.xdit.patching import host
from xfuser_cocodiff.xdit.platforms.platform import compute_device

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


def all_reduce(values: list[float], operation: str, timeout: float | None = None) -> list[float]:
    """Return numbers reduced over all ranks; all of them must call this.

    Args:
        values: of this rank.
        operation: "sum", "min" or "max".
        timeout: in seconds; when not given, the shorter one of the groups for host memory and for the device.

    Raises:
        UnresponsiveRankError: a rank does not respond.
    """
    group = host.sequence_group().cpu_group
    # No longer than the device's collectives may take: their watchdog would end the process before a rank is named.
    device_limit = timeout_of(host.sequence_group().device_group, compute_device())
    limit = timedelta(seconds=timeout) if timeout else min(timeout_of(group, devices.CPU), device_limit)
    tensor = torch.tensor(values, dtype=torch.float64)
    with failure_detection.report_failed_ranks(group, "agreement"):
        dist.all_reduce(tensor, _OPERATIONS[operation], group=group, async_op=True).wait(limit)
    return tensor.tolist()


def mean(values: list[float], timeout: float | None = None) -> list[float]:
    """Return the mean over all ranks of each number; see :func:`all_reduce`."""
    *sums, ranks = all_reduce([*values, 1.0], "sum", timeout)
    return [value / ranks for value in sums]


def all_agree(value: object, timeout: float | None = None) -> bool:
    """Return whether all ranks pass the same value; see :func:`all_reduce`."""
    number = zlib.crc32(repr(value).encode())
    least, negated = all_reduce([number, -number], "min", timeout)
    return least == -negated
