"""Choice of overlap schedules for calls of one size: set by the user, bit-identical, and possibly faster."""

from collections.abc import Mapping, Sequence

import torch

from xfuser_cocodiff.engine.attention.overlap_schedule import OverlapSchedule
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.xdit.layers.layer_signature import LayerSignature
from xfuser_cocodiff.xdit.layers.schedule_candidates import ScheduleCandidates
from xfuser_cocodiff.xdit.patching.log import info_once, warn_once
from xfuser_cocodiff.xdit.session.session import Session


def share_schedules(signature: LayerSignature, session: Session) -> None:
    """Let a new signature have the schedules of its size, if they are known. No rank communicates."""
    signature.candidates = session.layers.signatures.candidates.get(signature.key)
    if signature.candidates and session.runtime:  # whose results may differ by bits
        signature.is_same = {(each.groups, each.gathers_kv): True for each in signature.candidates.schedules}


def choose_schedules(
    signature: LayerSignature,
    session: Session,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_same: Mapping[int, bool] | None = None,
    is_same_gathered: Mapping[int, bool] | None = None,
) -> None:
    """Set which schedules of a layer signature are bit-identical, and the candidate schedules unless its size has some.

    All ranks that share a sequence must call this.

    Args:
        signature: layer signature.
        session: active session.
        query: Q of a call as it is sent; only its size matters.
        key: K, likewise.
        value: V, likewise.
        is_same: whether attention is bit-identical on this rank, by number of head groups; the same numbers on all
            ranks.
        is_same_gathered: the same with gathered K and V; empty where that is not tried.
    """
    checked = {(number, False): same for number, same in (is_same or {}).items()}
    checked |= {(number, True): same for number, same in (is_same_gathered or {}).items()}
    if signature.candidates:
        _agree(signature, session, checked)
        schedule = signature.candidates.schedule
        signature.is_same.setdefault((schedule.groups, schedule.gathers_kv), False)  # this call cannot run by it
        return
    fixed, policy, flat = session.overlap.v_first, session.mesh.policy, session.comm_setup.flat_mesh
    nbytes = query.nbytes + key.nbytes + value.nbytes
    pays_off = fixed is None and signature.ready and policy.sends_early(value.nbytes, nbytes)
    is_synchronous = session.config is not None and session.config.synchronous
    has_mlp = signature.has_parallel_mlp and fixed is not False and not is_synchronous
    sizes = [value.nbytes, query.nbytes + key.nbytes] if pays_off else [nbytes]
    is_flat = flat is None or {policy.choose(size) for size in (*sizes, query.nbytes)} == {Plan.flat(flat.topology)}
    # Links differ between the Ulysses groups of a ring, and hooks of the MLP between ranks.
    if fixed is not False:
        pays_off, has_mlp, is_flat = _agree(signature, session, checked, pays_off, has_mlp, is_flat)
    else:
        _agree(signature, session, checked)
    usable = [number for (number, gathers_kv), same in signature.is_same.items() if same and not gathers_kv]
    gathered = [number for (number, gathers_kv), same in signature.is_same.items() if same and gathers_kv]
    if session.overlap.head_groups and signature.unequal:
        warn_once(
            f"--cocodiff_head_groups {session.overlap.head_groups} has no effect: attention by head groups is not "
            "bit-identical; leave it out"
        )
    groups = usable.pop() if session.overlap.head_groups and usable else 1
    overlapped = OverlapSchedule(signature.ready if fixed else pays_off, groups, has_mlp)
    sequential = OverlapSchedule(groups=groups, flat=session.runtime is None and not is_flat)
    cached = session.cached_schedule(signature)
    # The check is repeated in each process: kernels may have changed.
    if cached and cached.groups in (gathered if cached.gathers_kv else (1, *usable)):
        schedules = [cached]
    elif fixed is None:
        schedules = [sequential, overlapped, *(overlapped._replace(groups=number) for number in usable)]
    else:
        schedules = [overlapped]
    if is_same_gathered and session.config.plan:
        schedules = _with_gather(signature, schedules, gathered)
    elif len(schedules) > 1:
        numbers = [number for number in gathered if number == groups or not session.overlap.head_groups]
        schedules += [overlapped._replace(groups=number, gathers_kv=True) for number in numbers]
    signature.candidates = session.layers.signatures.candidates[signature.key] = ScheduleCandidates(schedules)


def _agree(
    signature: LayerSignature, session: Session, checked: Mapping[tuple[int, bool], bool], *others: bool
) -> list[bool]:
    """Set which of the checked divisions are bit-identical on all ranks, and return whether others hold on all."""
    values = *others, *checked.values()
    answers = [bool(each) for each in session.all_reduce(list(map(float, values)), "min")] if values else []
    signature.is_same |= dict(zip(checked, answers[len(others) :], strict=True))
    return answers[: len(others)]


def _with_gather(
    signature: LayerSignature, schedules: Sequence[OverlapSchedule], gathered: Sequence[int]
) -> list[OverlapSchedule]:
    """Return schedules with gathered K and V, as a plan asks for, where their bits are the same.

    Args:
        signature: layer signature.
        schedules: schedules of all-to-alls by heads.
        gathered: numbers of head groups with which attention to gathered K and V is bit-identical.
    """
    if gathered:
        return [
            each._replace(groups=each.groups if each.groups in gathered else 1, flat=False, gathers_kv=True)
            for each in schedules
        ]
    info_once(
        f"{signature.name}: K and V are not gathered, since attention of a part of the queries is not bit-identical; "
        "all-to-alls by heads run instead"
    )
    return list(schedules)
