"""Attention of the layer that runs, in eager mode: its exchanges, what is learned of them, and what they try."""

from collections.abc import Callable

import torch

from xfuser_cocodiff.engine.attention.overlap_schedule import OverlapSchedule
from xfuser_cocodiff.engine.attention.reshard import HEADS
from xfuser_cocodiff.engine.attention.ulysses import Attend, ulysses_attention
from xfuser_cocodiff.engine.comm.comm_stream import Handle
from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes
from xfuser_cocodiff.xdit.attention.schedule_choice import HeadGroupCheck, choose_schedules, usable_head_groups
from xfuser_cocodiff.xdit.session.session import Session


def started_value(value: torch.Tensor, session: Session) -> Handle | None:
    """The exchange of V that the layer that runs has begun, if it has; the layer abandons it at the end of its call
    if nobody has waited for it. Every rank of the group must call this.

    Args:
        value: V as its attention was given it, shape (B, H, S/P, D).
        session: in force.
    """
    session.select_kernels()
    layer = session.layers.current
    if layer is None:
        session.layers.discover()
    return layer.value_under_way(value) if layer else None


def scheduled_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attend_by: Callable[[LayerCodecs | None, str], Attend],
    under_way: Handle | None,
    session: Session,
    cuts_heads: bool = False,
) -> torch.Tensor:
    """Ulysses attention by the schedule of the layer that runs, with its codecs.

    Args:
        query: shape (B, H, S/P, D).
        key: the same, perhaps with fewer heads or of other tokens.
        value: as `key`.
        attend_by: what attention is, given how a ring's K and V are encoded and the name of the layer.
        under_way: see :func:`started_value`.
        session: in force.
        cuts_heads: whether attention may be called for some of the heads.

    Returns:
        O, shape (B, H, S/P, D).
    """
    mesh, layer = session.mesh, session.layers.current
    signature = layer.call.signature if layer else None
    sizes = LayerSizes.of(query, key, value)
    if signature:
        signature.sizes = sizes
    running = layer or session.layers.running_layer()
    layer_codecs = session.layer_codecs(running, sizes)
    name, schedule = (layer.name, layer.call.schedule) if layer else ("", OverlapSchedule())
    attend = attend_by(session.ring_codecs(running, sizes) if session.ring else None, name)
    if mesh.topology.size == 1:
        return attend(query, key, value, ALL_HEADS)
    if signature and signature.candidates is None and (signature.ready or signature.refusal):
        heads = [tensor.shape[HEADS] // mesh.topology.size for tensor in (query, key)]
        groups = usable_head_groups(session, *heads) if cuts_heads else 1
        comparing = HeadGroupCheck(attend, groups)
        result = ulysses_attention(query, key, value, comparing, mesh, 1, name, under_way, layer_codecs)
        choose_schedules(signature, session, query, key, value, groups, comparing.is_same)
        return result
    beside = layer.call.compute_deferred if layer and layer.call.deferred else None
    mesh = session.mesh_of(schedule)
    return ulysses_attention(query, key, value, attend, mesh, schedule.groups, name, under_way, layer_codecs, beside)
