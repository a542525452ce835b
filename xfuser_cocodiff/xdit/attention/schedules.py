"""Schedules that the layers of a kind may run by: what the user has fixed, what changes no bit, what may be faster."""

import time
from collections.abc import Callable

import torch

from xfuser_cocodiff.attention.reshard import HEADS
from xfuser_cocodiff.attention.schedule import BESIDE_QKV, GROUP_COUNTS, Schedule, Trial
from xfuser_cocodiff.attention.ulysses import Attend
from xfuser_cocodiff.exchange.head_group import ALL_HEADS, HeadGroup
from xfuser_cocodiff.machine import device as devices
from xfuser_cocodiff.xdit.engine.engine import Engine
from xfuser_cocodiff.xdit.layers.kind import Kind
from xfuser_cocodiff.xdit.patching.log import warn
from xfuser_cocodiff.xdit.platform.platform import compute_device


def counts_in_question(engine: Engine, kind: Kind, heads: list[int]) -> list[int]:
    """Numbers of head groups that may be used if they change no bit; by what is the same on every rank."""
    wanted = engine.overlap.head_groups
    if engine.runtime or (wanted is None and devices.of(compute_device().type).queues):
        return []
    counts = GROUP_COUNTS[1:] if wanted is None else [wanted] if wanted > 1 else []
    known = engine.known_schedule(kind)
    # What an earlier process found fastest, it may have found with another kind of attention.
    return [n for n in counts if all(number % n == 0 for number in heads) and (known is None or n == known.groups)]


class Comparing:
    """Attention that also finds out by which numbers of groups its heads can be cut without changing a bit of it.

    Args:
        attend: the attention.
        counts: the numbers of groups.
    """

    def __init__(self, attend: Attend, counts: list[int]) -> None:
        self._attend = attend
        self.same = dict.fromkeys(counts, False)
        """Whether no bit changes, on this rank, by number of groups."""
        self.seconds = 0.0
        """That comparing took."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_group: HeadGroup
    ) -> torch.Tensor:
        result, began = self._attend(query, key, value, ALL_HEADS), time.perf_counter()
        for count in self.same:
            head_groups = [HeadGroup(index, count) for index in range(count)]
            cut = [
                self._attend(
                    head_group.of(query, HEADS), head_group.of(key, HEADS), head_group.of(value, HEADS), head_group
                )
                for head_group in head_groups
            ]
            self.same[count] = torch.equal(torch.cat(cut, HEADS), result)
        self.seconds += time.perf_counter() - began
        return result


def settle(kind: Kind, engine: Engine, comparing: Comparing, ahead: Callable[[], bool]) -> None:
    """Settle which schedules a kind of layer may run by, once its heads were cut and compared. All ranks do it alike.

    Args:
        kind: of layer.
        engine: whose ranks agree.
        comparing: what this one has found.
        ahead: see :func:`_trial`.
    """
    began, counts, known = time.perf_counter(), list(comparing.same), engine.known_schedule(kind)
    has_mlp, *same = engine.reduced([float(each) for each in (kind.has_parallel_mlp, *comparing.same.values())], "min")
    kind.has_parallel_mlp = bool(has_mlp)
    equal = [count for count, is_same in zip(counts, same, strict=True) if is_same]
    kind.unequal = tuple(count for count in counts if count not in equal)
    if known and known.groups in (1, *equal):
        kind.trial = Trial([known])
    else:
        kind.trial = _trial(engine, kind, equal, ahead)
    if counts:
        engine.trials.spend(comparing.seconds + time.perf_counter() - began)


def settle_in_graph(kind: Kind, engine: Engine, groups: int, ahead: Callable[[], bool]) -> None:
    """The same in a graph, which has its number of head groups."""
    known = engine.known_schedule(kind)
    if known and known.groups == groups:
        kind.trial = Trial([known])
        return
    wanted = engine.overlap.v_first
    schedules = [Schedule(v_first, groups) for v_first in (False, True) if wanted in (None, v_first)]
    if len(schedules) > 1 and devices.of(compute_device().type).queues:  # the host does not see how long a layer takes
        schedules = [Schedule(ahead(), groups)]
    kind.trial = Trial(schedules)


def _trial(engine: Engine, kind: Kind, counts: list[int], ahead: Callable[[], bool]) -> Trial:
    """The schedules that a kind of layer may run by.

    Args:
        engine: whose ranks try them.
        kind: of layer, whose V may be able to go first.
        counts: numbers of head groups, beside 1, that change no bit.
        ahead: asked where it is not tried whether V is to go first; else Q, K and V are one message. All ranks get the
            same answer.
    """
    wanted = engine.overlap
    v_first = kind.ready and wanted.v_first is not False
    has_mlp = kind.has_parallel_mlp and None in (wanted.v_first, wanted.head_groups)
    if engine.runtime:
        if wanted.head_groups not in (None, 1):
            warn("heads stay in one group: in modes that approximate, references belong to whole tensors")
        counts = [1]
    elif wanted.head_groups is None:
        counts = [1, *counts]
    elif wanted.head_groups in (1, *counts):
        counts = [wanted.head_groups]
    else:
        warn(f"heads stay in one group: {wanted.head_groups} groups do not divide them, or would change bits")
        counts = [1]
    schedules = [Schedule(v_first, count) for count in counts]
    if wanted.v_first is None and v_first:
        schedules.insert(0, Schedule(False, counts[0]))
    is_timed = not devices.of(compute_device().type).queues  # else the host does not see how long a layer takes
    if not is_timed and (len(schedules) > 1 or has_mlp):
        goes_ahead = v_first and (wanted.v_first is True or ahead())
        beside = BESIDE_QKV if has_mlp and not engine.planned.synchronous else ""
        return Trial([Schedule(goes_ahead, counts[0], beside)])
    return Trial(schedules, has_mlp)
