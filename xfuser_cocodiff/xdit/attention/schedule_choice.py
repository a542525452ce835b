"""Choice of overlap schedules for layers of one size: set by the user, bit-identical, and possibly faster."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from xfuser_cocodiff.engine.attention.overlap_schedule import BY_HEADS, Division, OverlapSchedule
from xfuser_cocodiff.engine.attention.reshard import HEADS
from xfuser_cocodiff.engine.topology import head_groups
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.xdit.layers.layer_signature import LayerSignature
from xfuser_cocodiff.xdit.layers.schedule_candidates import ScheduleCandidates
from xfuser_cocodiff.xdit.patching.log import info_once, warn_once
from xfuser_cocodiff.xdit.session.reductions import all_reduce
from xfuser_cocodiff.xdit.session.session import Session
from xfuser_cocodiff.xdit.settings.config import Overlap

Tensors = Sequence[torch.Tensor]
"""Q, K and V of a rank, as they are sent, (B, H, S/P, D) each; only their sizes matter here."""


class Worthwhile(NamedTuple):
    """What may save time in layers of one size, on all ranks."""

    v_first: bool
    """To send V before Q and K are computed."""
    mlp: bool
    """To compute an MLP parallel to attention while Q, K and V are in flight."""
    other_plan: bool
    """To send along the topology: the plan of some message is not flat, or K and V move along a ring."""
    divisions: tuple[Division, ...]
    """Other divisions than by heads, all at once."""


def share_schedules(signature: LayerSignature, session: Session) -> None:
    """Let a new signature have the schedules of its size, if they are known. No rank communicates."""
    signature.candidates = session.layers.signatures.candidates.get(signature.key)
    if signature.candidates and session.runtime:  # whose results may differ by bits
        signature.is_same |= {each.division: True for each in signature.candidates.schedules}


def find_worthwhile(
    signature: LayerSignature, session: Session, by_heads: Tensors, gathered: Tensors | None, can_split_heads: bool
) -> Worthwhile:
    """Return what may save time, by the options, the cache and the planner. All ranks that share a sequence must call
    this, and get the same answer.

    Args:
        signature: layer signature.
        session: active session.
        by_heads: tensors of a call by heads.
        gathered: tensors where K and V are gathered, perhaps with less zero padding; None where they cannot be.
        can_split_heads: whether attention may be computed for some of the heads at a time.
    """
    fixed, policy, (query, key, value) = session.overlap.v_first, session.mesh.policy, by_heads
    nbytes, flat = [sum(each.nbytes for each in by_heads), query.nbytes], Plan.flat(session.mesh.topology)
    v_first = fixed is None and signature.ready and policy.sends_early(value.nbytes, nbytes[0])
    mlp = signature.has_parallel_mlp and fixed is not False and not session.config.synchronous
    tried: dict[Division, bool] = {}
    if can_split_heads:
        tried |= _head_groups(signature, session, query, key, gathered is not None and session.runtime is not None)
    if gathered and session.runtime is None:
        tried |= _gathers(signature, session, by_heads, gathered, tried)
    if fixed is False and not tried:
        return Worthwhile(False, False, True, ())
    # Links differ between the Ulysses groups of a ring.
    is_flat = all(policy.choose(size) == flat for size in nbytes)
    answers = [float(each) for each in (v_first, mlp, is_flat, *tried.values())]
    answers = all_reduce(answers, "min", session.config.timeout)
    divisions = tuple(division for division, pays in zip(tried, answers[3:], strict=True) if pays)
    return Worthwhile(bool(answers[0]), bool(answers[1]), not answers[2] or session.ring is not None, divisions)


def _head_groups(
    signature: LayerSignature, session: Session, query: torch.Tensor, key: torch.Tensor, gathers_coded: bool
) -> dict[Division, bool]:
    """Return the divisions by several head groups to try, and whether each pays by this rank's links."""
    heads = [tensor.shape[HEADS] // session.head_degree(gathers_coded) for tensor in (query, key)]
    by_coded_heads = session.runtime is not None and not gathers_coded
    if fixed := session.overlap.head_groups:
        return dict.fromkeys(_set_head_groups(fixed, heads, by_coded_heads), True)
    if by_coded_heads or session.overlap != Overlap():
        return {}
    if cached := session.tuning_results.schedule_of(signature):
        is_possible = cached.groups > 1 and not any(number % cached.groups for number in heads)
        return {cached.division: True} if is_possible and not cached.gathers_kv else {}
    pays = session.mesh.policy.splits_heads
    numbers = head_groups.divisors_to_try(*heads) if pays else []
    nbytes = query.nbytes + 2 * key.nbytes, query.nbytes
    return {(each, False): pays(*nbytes, each, fewer) for fewer, each in zip([1, *numbers], numbers, strict=False)}


def _set_head_groups(groups: int, heads: Sequence[int], by_coded_heads: bool) -> list[Division]:
    """Return the division by the number of head groups that is set; nothing where it is 1, or has no effect."""
    if groups == 1:
        return []
    if by_coded_heads:
        warn_once(
            "--cocodiff_head_groups has no effect in lossy modes where K and V are not gathered; leave it out, or "
            "choose --cocodiff_mode exact"
        )
        return []
    if any(number % groups for number in heads):
        warn_once(
            f"--cocodiff_head_groups {groups} has no effect: {' and '.join(map(str, heads))} heads per rank are not "
            "divisible by it; choose a divisor"
        )
        return []
    return [(groups, False)]


def _gathers(
    signature: LayerSignature, session: Session, by_heads: Tensors, gathered: Tensors, numbers: dict[Division, bool]
) -> dict[Division, bool]:
    """Return the divisions with gathered K and V to try in a lossless mode, and whether each pays by this rank's links:
    where a plan says so or an earlier process has chosen it, and where the planner expects to save time."""
    pays, cached = bool(session.config.plan), session.tuning_results.schedule_of(signature)
    if not pays and cached:
        return {cached.division: True} if cached.gathers_kv else {}
    if not pays and session.overlap.v_first is None and (predicts := session.mesh.policy.gathers_kv):
        pays = predicts([each.nbytes for each in by_heads], [each.nbytes for each in gathered])
    heads = [tensor.shape[HEADS] // session.gather.num_fast for tensor in gathered[:2]]
    groups = {1: True} | {number: is_worth for (number, _), is_worth in numbers.items()}
    return {
        (number, True): pays and is_worth
        for number, is_worth in groups.items()
        if not any(each % number for each in heads)
    }


def choose_schedules(
    signature: LayerSignature, session: Session, worthwhile: Worthwhile, stock_supports_it: bool = False
) -> None:
    """Set the candidate schedules of layers of one size.

    Args:
        signature: layer signature, with the divisions that are bit-identical.
        session: active session.
        worthwhile: what may save time.
        stock_supports_it: whether stock xDiT's own attention may run instead; the same on all ranks.
    """
    fixed = session.overlap
    same = [each for each in worthwhile.divisions if signature.is_same[each]]
    groups = fixed.head_groups if (fixed.head_groups, False) in same else 1
    if (fixed.head_groups, False) in worthwhile.divisions and groups == 1:
        warn_once(
            f"--cocodiff_head_groups {fixed.head_groups} has no effect: attention by head groups is not "
            "bit-identical; leave it out"
        )
    overlapped = OverlapSchedule(signature.ready if fixed.v_first else worthwhile.v_first, groups, worthwhile.mlp)
    sequential = OverlapSchedule(stock=True) if stock_supports_it else OverlapSchedule(groups=groups)
    cached = session.tuning_results.schedule_of(signature)
    if cached and cached.division in (BY_HEADS, *same) and (stock_supports_it or not cached.stock):
        schedules = [cached]  # the check is repeated in each process: kernels may have changed
    elif fixed.v_first is not None:
        schedules = [overlapped]
    elif overlapped == OverlapSchedule() and stock_supports_it and not (worthwhile.other_plan or same):
        schedules = [sequential]  # nothing else pays
    else:
        divisions = [each for each in same if each[0] == groups or not fixed.head_groups]
        schedules = [sequential, overlapped, *(overlapped.divided(each) for each in divisions)]
    if session.config.plan and any(gathers_kv for _, gathers_kv in worthwhile.divisions):
        schedules = _with_gather(signature, schedules, same)
    signature.candidates = session.layers.signatures.candidates[signature.key] = ScheduleCandidates(schedules)


def agree_on_bits(signature: LayerSignature, session: Session, is_same: dict[Division, bool]) -> None:
    """Set which divisions are bit-identical to stock's on all ranks; all of them must call this."""
    if is_same:
        answers = all_reduce([float(each) for each in is_same.values()], "min", session.config.timeout)
        signature.is_same |= {division: bool(each) for division, each in zip(is_same, answers, strict=True)}


def _with_gather(
    signature: LayerSignature, schedules: Sequence[OverlapSchedule], same: Sequence[Division]
) -> list[OverlapSchedule]:
    """Return schedules with gathered K and V, as a plan asks for, where their bits are the same."""
    if gathered := [groups for groups, gathers_kv in same if gathers_kv]:
        return [
            each._replace(groups=each.groups if each.groups in gathered else gathered[0], stock=False, gathers_kv=True)
            for each in schedules
        ]
    info_once(
        f"{signature.name}: K and V are not gathered, since attention of a part of the queries is not bit-identical; "
        "all-to-alls by heads run instead"
    )
    return list(schedules)
