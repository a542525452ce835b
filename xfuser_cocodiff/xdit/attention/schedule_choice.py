"""Choice of overlap schedules for the layers of a signature: set by the user, bit-identical, and possibly faster."""

from collections.abc import Mapping, Sequence

import torch

from xfuser_cocodiff.engine.attention.overlap_schedule import OverlapSchedule, ScheduleCandidates
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.xdit.layers.layer_signature import LayerSignature
from xfuser_cocodiff.xdit.patching.log import info_once, warn_once
from xfuser_cocodiff.xdit.session.session import Session


def choose_schedules(
    signature: LayerSignature,
    session: Session,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_same: Mapping[int, bool] | None = None,
    is_same_gathered: Mapping[int, bool] | None = None,
) -> None:
    """Set the candidate schedules of a layer signature. All ranks that share a sequence must call this.

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
    fixed, policy, flat = session.overlap.v_first, session.mesh.policy, session.comm_setup.flat_mesh
    nbytes = query.nbytes + key.nbytes + value.nbytes
    pays_off = fixed is None and signature.ready and policy.sends_early(value.nbytes, nbytes)
    has_mlp = signature.has_parallel_mlp and fixed is not False and not session.comm_setup.synchronous
    sizes = [value.nbytes, query.nbytes + key.nbytes] if pays_off else [nbytes]
    is_flat = flat is None or {policy.choose(size) for size in (*sizes, query.nbytes)} == {Plan.flat(flat.topology)}
    # Links differ between the Ulysses groups of a ring, and hooks of the MLP between ranks.
    is_same, is_same_gathered = is_same or {}, is_same_gathered or {}
    checked = *is_same.values(), *is_same_gathered.values()
    answers = session.all_reduce([float(each) for each in (pays_off, has_mlp, is_flat, *checked)], "min")
    pays_off, has_mlp, is_flat, *are_same = map(bool, answers)
    usable = [number for number, same in zip(is_same, are_same, strict=False) if same]
    gathered = [number for number, same in zip(is_same_gathered, are_same[len(is_same) :], strict=True) if same]
    signature.unequal = tuple(number for number in is_same if number not in usable)
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
    signature.candidates = ScheduleCandidates(schedules)


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
