"""Predicts collectives by the planner's cost model: seconds, and bytes along each axis."""

import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from xfuser_cocodiff.engine.topology import planner
from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology


@dataclass(frozen=True)
class Message:
    """One message of a layer on a rank: the collectives that carry it, one after the other, and the work around it."""

    seconds: float = 0.0
    """Seconds until it has arrived, without the copies around it."""
    sent_bytes: Mapping[str, float] = field(default_factory=dict)
    """Bytes that the rank sends along each axis, by name."""
    collectives: int = 0
    """Number of collectives: the stages of their plans."""
    nbytes: float = 0.0
    """Bytes per rank that are copied; 0 if there is nothing to send."""
    copies: int = 0
    """Copies into and out of its buffers."""
    operators: int = 0
    """Operators that the host calls for it, including the copies."""
    codec_seconds: float = 0.0
    """Part of `seconds` in which its codecs take the device, so that it computes nothing else."""

    @classmethod
    def sum(cls, costs: Iterable["Message"]) -> "Message":
        """Return the collectives of all of them, one after the other."""
        parts = list(costs)
        sent = Counter[str]()
        for each in parts:
            sent.update(each.sent_bytes)
        return cls(sum(each.seconds for each in parts), dict(sent), sum(each.collectives for each in parts))

    def coded(self, codec_seconds: float, **work: Any) -> "Message":
        """Return the message with the time of its codecs, and the work around it."""
        return replace(self, seconds=self.seconds + codec_seconds, codec_seconds=codec_seconds, **work)


def all_to_all(profile: Profile, message_bytes: float, plan: Plan | None = None) -> Message:
    """Return the cost of an all-to-all.

    Args:
        profile: link profile.
        message_bytes: size of the message of each rank, including the block that it keeps.
        plan: its plan; the best one when not given.
    """
    plan = plan or planner.choose_plan(profile, message_bytes)
    seconds = planner.all_to_all_seconds(profile, plan, message_bytes)
    return Message(seconds, sent_bytes(plan, message_bytes), len(plan.stages))


def all_gather(profile: Profile, block_bytes: float, plan: Plan | None = None) -> Message:
    """Return the cost of an all-gather.

    Args:
        profile: link profile.
        block_bytes: size of the block of each rank.
        plan: its plan; the best one when not given.
    """
    plan = plan or planner.choose_gather_plan(profile, block_bytes)
    seconds = planner.gather_seconds(profile, plan, block_bytes)
    return Message(seconds, gathered_bytes(plan, block_bytes), len(plan.stages))


def coded_all_to_all(profile: Profile, message_bytes: float, payload_bytes: float, slow_axes: Sequence[str]) -> Message:
    """Return the cost of an all-to-all whose values cross the fast axes first, and then, encoded, the slow ones.

    Args:
        profile: link profile.
        message_bytes: size of the message of each rank, including the block that it keeps.
        payload_bytes: size of the encoded message.
        slow_axes: names of the slow axes.
    """
    slow, fast = planner.divide_axes(profile, slow_axes)
    parts = [(fast, message_bytes), (slow, payload_bytes)]
    return Message.sum(all_to_all(part, size) for part, size in parts if part)


def ring_gather(
    profile: Profile, block_bytes: float, payload_bytes: float | None = None, slow_axes: Sequence[str] = ()
) -> Message:
    """Return the cost of gathering K and V of all ranks of a ring.

    A coded block crosses the slow axes first. A rank's own block and those that it has decoded then cross the fast
    ones.

    Args:
        profile: link profile of the ring.
        block_bytes: size of K and V of a rank.
        payload_bytes: size of the encoded block for slow axes; None for a lossless ring.
        slow_axes: names of the slow axes.
    """
    slow, fast = planner.divide_axes(profile, slow_axes)
    if payload_bytes is None or slow is None:
        return all_gather(profile, block_bytes)
    others_bytes = (slow.topology.size - 1) * block_bytes
    parts = [(slow, payload_bytes), (fast, block_bytes), (fast, others_bytes)]
    return Message.sum(all_gather(part, size) for part, size in parts if part)


def sent_bytes(plan: Plan, message_bytes: float) -> dict[str, float]:
    """Return the bytes that a rank sends along each axis in an all-to-all, by name.

    A peer belongs to the outermost axis on which it differs.

    Args:
        plan: plan of the all-to-all.
        message_bytes: size of the rank's message, including the block that it keeps.
    """
    sizes = ([plan.topology.shape[dim] for dim in stage] for stage in plan.stages)
    return _bytes_along_axes(plan, [message_bytes / math.prod(each) for each in sizes])


def gathered_bytes(plan: Plan, block_bytes: float) -> dict[str, float]:
    """Return the bytes that a rank sends along each axis in an all-gather of blocks of this size, by name."""
    sizes = (math.prod(plan.topology.shape[dim] for dim in stage) for stage in plan.stages)
    return _bytes_along_axes(plan, itertools.accumulate(sizes, operator.mul, initial=block_bytes))


def _bytes_along_axes(plan: Plan, blocks: Iterable[float]) -> dict[str, float]:
    """Return the bytes along each axis, given the block with which each stage begins."""
    sent = dict.fromkeys((axis.name for axis in plan.topology.axes), 0.0)
    for stage, block in zip(plan.stages, blocks, strict=False):
        for dim in reversed(stage):
            axis = plan.topology.axes[dim]
            sent[axis.name] += (axis.size - 1) * block
            block *= axis.size
    return sent


def num_ranks_along(topology: Topology, axes: Sequence[str]) -> int:
    """Return the number of coordinates on the named axes."""
    return math.prod(axis.size for axis in topology.axes if axis.name in axes)
