"""Ulysses attention of the running layer in eager mode, by its overlap schedule.

Sizes in shapes: P ranks of a Ulysses group, B batch, H heads, S sequence, D head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from xfuser_cocodiff.engine.attention.overlap_schedule import OverlapSchedule
from xfuser_cocodiff.engine.attention.ulysses import Attend, UlyssesAttention
from xfuser_cocodiff.engine.comm.comm_stream import Handle
from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes
from xfuser_cocodiff.xdit.attention.gather_check import compare_gathered, groups_to_compare
from xfuser_cocodiff.xdit.attention.head_group_choice import HeadGroupCheck, head_groups_to_check
from xfuser_cocodiff.xdit.attention.schedule_choice import choose_schedules, share_schedules
from xfuser_cocodiff.xdit.patching.log import info_once, warn_once
from xfuser_cocodiff.xdit.session.session import Session


@dataclass(frozen=True)
class AttentionInputs:
    """What attention needs of a call, for one way to divide its heads over ranks."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """Q, K and V as they are sent, shape (B, H, S/P, D) each; Q with joint tokens, K and V possibly with fewer heads or
    another number of tokens."""
    attend_with: Callable[[LayerCodecs | None, str], Attend]
    """Returns the attention, given the codecs of a ring and the name of the layer."""


def scheduled_attention(
    inputs_for: Callable[[AxisPartition | None], AttentionInputs],
    in_flight: Handle | None,
    session: Session,
    can_split_heads: bool = False,
    gathers_kv: bool = False,
    can_gather: bool = False,
) -> torch.Tensor:
    """Compute Ulysses attention by the schedule of the running layer, with its codecs.

    The first call of a size decides on the schedules that its layers may use, and each signature checks their bits.

    Args:
        inputs_for: returns the inputs, given the axes along which K and V are gathered, or None.
        in_flight: handle of V if its all-to-all is in flight already.
        session: active session.
        can_split_heads: whether attention may be computed for some of the heads at a time, if it is bit-identical.
        gathers_kv: whether K and V are gathered if this call is encoded.
        can_gather: whether attention may have fewer queries than keys, if it is bit-identical in a lossless mode.

    Returns:
        O, shape (B, H, S/P, D).
    """
    layer = session.layers.current
    signature = layer.call.signature if layer else None
    name, schedule = (layer.name, layer.call.schedule) if layer else ("", OverlapSchedule())
    allowed = schedule._replace(
        groups=schedule.groups if can_split_heads else 1, gathers_kv=schedule.gathers_kv and can_gather
    )
    must_restart = session.runtime is None and schedule != allowed
    if must_restart:
        signature.is_same[schedule.groups, schedule.gathers_kv], schedule = False, allowed
    expects_gather = gathers_kv or schedule.gathers_kv
    inputs = inputs_for(session.gather if expects_gather else None)
    sizes = LayerSizes.of(*inputs.tensors)
    if signature:
        signature.sizes, signature.gathers_kv = sizes, gathers_kv
    layer_codecs = session.layer_codecs(layer, sizes, gathers_kv)
    if layer_codecs and layer_codecs.gathers_kv and not can_gather:
        must_restart, layer_codecs = True, session.layer_codecs_by_heads(layer, sizes)
    if must_restart and in_flight:
        in_flight.drain()
        in_flight = None
    gathers_now = layer_codecs.gathers_kv if layer_codecs else schedule.gathers_kv
    gather = session.gather if gathers_now else None
    if gathers_now != expects_gather:
        inputs = inputs_for(gather)
    attend = inputs.attend_with(session.ring_codecs(layer, sizes) if session.ring else None, name)
    if session.mesh.topology.size == 1:
        return attend(*inputs.tensors, ALL_HEADS)
    if signature and not can_split_heads and (session.overlap.head_groups or 1) > 1:
        warn_once(
            f"{signature.name}: --cocodiff_head_groups {session.overlap.head_groups} has no effect, since "
            "attention needs all heads at once (quantizing backend, PipeFusion, or xDiT's long-context attention)"
        )
    if signature and signature.candidates is None:
        share_schedules(signature, session)
    if signature and not signature.is_checked and signature.structure.is_known:
        numbers = head_groups_to_check(signature, session, *inputs.tensors, gathers_now) if can_split_heads else []
        check = HeadGroupCheck(attend, numbers)
        ulysses = UlyssesAttention(session.mesh, 1, name, in_flight, layer_codecs, gather)
        output = ulysses.run(*inputs.tensors, check)
        same_gathered = {}
        if session.config and session.config.plan and session.config.plan.gathers_kv and not can_gather:
            info_once(
                f"{signature.name}: K and V are not gathered, since attention needs all queries (causal, a "
                "per-query mask, sparse, or xDiT's long-context attention); all-to-alls by heads run instead"
            )
        if can_gather and session.gather and session.runtime is None:
            gathered = inputs_for(session.gather)
            tried = groups_to_compare(session, signature, inputs.tensors, gathered.tensors, numbers)
            attend = gathered.attend_with(None, name)
            same_gathered = compare_gathered(session, name, gathered.tensors, attend, output, tried)
        choose_schedules(signature, session, *inputs.tensors, check.is_same, same_gathered)
        return output
    deferred = layer.take_deferred() if layer else []
    beside = (lambda: [each.materialize() for each in deferred]) if deferred else None
    mesh, groups = session.mesh_of(schedule), session.num_head_groups(schedule, layer_codecs)
    ulysses = UlyssesAttention(mesh, groups, name, in_flight, layer_codecs, gather)
    return ulysses.run(*inputs.tensors, attend, beside)
