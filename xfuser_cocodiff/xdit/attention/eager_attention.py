"""Ulysses attention of the running layer in eager mode, by its overlap schedule.

Sizes in shapes: P ranks of a Ulysses group, B batch, H heads, S sequence, D head dim.
"""

from collections.abc import Callable

import torch

from xfuser_cocodiff.engine.attention.overlap_schedule import OverlapSchedule
from xfuser_cocodiff.engine.attention.ulysses import Attend, ulysses_attention
from xfuser_cocodiff.engine.comm.comm_stream import Handle
from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes
from xfuser_cocodiff.xdit.attention.head_group_choice import HeadGroupCheck, head_groups_to_check
from xfuser_cocodiff.xdit.attention.schedule_choice import choose_schedules
from xfuser_cocodiff.xdit.session.session import Session


def early_value(value: torch.Tensor, session: Session) -> Handle | None:
    """Return the handle of V if the running layer has started its all-to-all before USP was called.

    The layer drains the handle at the end of its call if it has not been waited for. Every rank of the group must call
    this.

    Args:
        value: V as USP is given it, shape (B, H, S/P, D).
        session: active session.
    """
    session.select_kernels()
    layer = session.layers.current
    if layer is None:
        session.layers.discover()
    return layer.claim_v_handle(value) if layer else None


def scheduled_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attend_with: Callable[[LayerCodecs | None, str], Attend],
    in_flight: Handle | None,
    session: Session,
    can_split_heads: bool = False,
) -> torch.Tensor:
    """Compute Ulysses attention by the schedule of the running layer, with its codecs.

    The first call of a layer signature decides on the schedules that its layers may use.

    Args:
        query: shape (B, H, S/P, D).
        key: as `query`, possibly with fewer heads or another number of tokens.
        value: as `key`.
        attend_with: returns the attention, given the codecs of a ring and the name of the layer.
        in_flight: handle of V, see :func:`early_value`.
        session: active session.
        can_split_heads: whether attention may be computed for some of the heads at a time.

    Returns:
        O, shape (B, H, S/P, D).
    """
    mesh, layer = session.mesh, session.layers.current
    signature = layer.call.signature if layer else None
    sizes = LayerSizes.of(query, key, value)
    if signature:
        signature.sizes = sizes
    place = layer or session.layers.running_layer()
    layer_codecs = session.layer_codecs(place, sizes)
    name, schedule = (layer.name, layer.call.schedule) if layer else ("", OverlapSchedule())
    attend = attend_with(session.ring_codecs(place, sizes) if session.ring else None, name)
    if mesh.topology.size == 1:
        return attend(query, key, value, ALL_HEADS)
    if signature and signature.candidates is None and (signature.ready or signature.refusal):
        numbers = head_groups_to_check(signature, session, query, key, value) if can_split_heads else []
        check = HeadGroupCheck(attend, numbers)
        output = ulysses_attention(query, key, value, check, mesh, 1, name, in_flight, layer_codecs)
        choose_schedules(signature, session, query, key, value, check.is_same)
        return output
    beside = layer.call.compute_deferred if layer and layer.call.deferred else None
    mesh = session.mesh_of(schedule)
    return ulysses_attention(query, key, value, attend, mesh, schedule.groups, name, in_flight, layer_codecs, beside)
