"""Replacement of xDiT's USP whose all-to-alls overlap with computation: V-First, and heads in groups."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from xfuser_cocodiff.engine.attention.reshard import HEADS, SEQUENCE, reshard
from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS
from xfuser_cocodiff.xdit.attention import custom_ops, eager_attention
from xfuser_cocodiff.xdit.attention.usp_call import USPCall
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.session import usp_versions
from xfuser_cocodiff.xdit.session.graph_passes import overlap_collectives
from xfuser_cocodiff.xdit.session.session import Session, active


def patches() -> list[Patch]:
    """Return the patch of USP, except for one that is unknown."""
    condition = usp_versions.is_known
    return [Patch(usp_versions.MODULE, "USP", "V-First and head groups", _with_overlap, condition=condition)]


def _with_overlap(original: Callable) -> Callable:
    @functools.wraps(original)
    def USP(*args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: N802 (xDiT's name)
        session = active()
        is_compiling = torch.compiler.is_compiling()
        if session.mesh is None and (session.virtual_group is None or is_compiling):
            return original(*args, **kwargs)
        call = USPCall(original, session, *args, **kwargs)
        if session.mesh is None:
            session.select_kernels()
            return session.virtual_group.attention(call)
        output = (_compiled_attention if is_compiling else _eager_attention)(call, session)
        heads = call.query.shape[HEADS]
        return output if output.shape[HEADS] == heads else output[:, :heads]

    return USP


def _compiled_attention(call: USPCall, session: Session) -> torch.Tensor:
    """Compute attention in a compiled graph: in lossy modes by a custom operator, else by collectives that PyTorch
    traces, which CUDA graphs can capture."""
    mesh = session.mesh
    if not call.is_supported() or mesh.topology.size == 1:
        return call.compute_by_xdit()
    if session.runtime and custom_ops.supports(call):
        return custom_ops.attention(call)
    overlap_collectives()
    inputs = call.inputs(None, with_ring=False)
    query, key, value = inputs.tensors
    if session.sends_v_first(value):
        [value] = reshard([value], HEADS, SEQUENCE, mesh)
        query, key = reshard([query, key], HEADS, SEQUENCE, mesh)
    else:
        query, key, value = reshard([query, key, value], HEADS, SEQUENCE, mesh)
    attend = inputs.attend_with(None, "")
    return reshard([attend(query, key, value, ALL_HEADS)], SEQUENCE, HEADS, mesh)[0]


def _eager_attention(call: USPCall, session: Session) -> torch.Tensor:
    """Compute attention in eager mode, by the schedule of the layer."""
    session.select_kernels()
    with session.layers.in_usp(call.value) as in_flight:
        if call.is_supported():
            return eager_attention.attend(call, in_flight, session)
        if in_flight:
            in_flight.drain()
        return call.compute_by_xdit()
