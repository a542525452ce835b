"""All-to-alls of attention as custom operators for compiled graphs in lossy modes.

When a graph runs, the operators use plans, codecs and statistics as eager mode does. Ordered effects and a ticket, a
tensor that each operator passes to the next, keep them in one order, the same on all ranks, so that one attention call
is in flight at a time. An operator takes tensors that were sent before once more, to keep them alive until then and to
tell the shape of its result.

Sizes in shapes: P ranks over which heads are divided, G coordinates along which K and V are gathered (1 where they are
not), B batch, H heads, S sequence, D head dim.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from xfuser_cocodiff.engine.attention.overlap_schedule import OverlapSchedule
from xfuser_cocodiff.engine.attention.ulysses import Attend, UlyssesAttention, output_like
from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes
from xfuser_cocodiff.xdit.attention.tracing import traced_path
from xfuser_cocodiff.xdit.layers.layer_call import TracedCall
from xfuser_cocodiff.xdit.layers.root_module import BaseLayer
from xfuser_cocodiff.xdit.patching.log import warn_once
from xfuser_cocodiff.xdit.session.session import HEAD_GROUPS_IGNORED, Session, active

_LIBRARY = torch.library.Library("cocodiff", "DEF")
_TAGS = (torch.Tag.cudagraph_unsafe,)
"""Operators stay out of CUDA graphs, which would repeat the messages of one step."""


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attend: Attend,
    num_ranks: int,
    num_gathered: int = 1,
) -> torch.Tensor:
    """Compute Ulysses attention in a compiled graph.

    Args:
        query: shape (B, H, S/(P G), D).
        key: as `query`, possibly with fewer heads.
        value: as `key`.
        attend: attention of a head group.
        num_ranks: number of ranks P over which heads are divided.
        num_gathered: number of coordinates G along which K and V are gathered; 1 where they are not.

    Returns:
        O, shape (B, H, S/(P G), D).
    """
    ops = torch.ops.cocodiff
    ticket = ops.send_value(value, traced_path(), num_gathered)
    ticket = ops.send_query_key(ticket, query, key, value)
    q, k, v = ops.receive_heads(ticket, query, key, value, num_ranks, num_gathered)
    output = attend(q, k, v, ALL_HEADS)
    ticket = ops.send_output(ticket, output)
    return ops.receive_sequence(ticket, output, num_ranks)


# Implementations, which run when a graph runs.


def _send_value(value: torch.Tensor, path: str, num_gathered: int) -> torch.Tensor:
    """Start the all-to-all of V if it goes first, from the second call of its shape on: codecs depend on the sizes of Q
    and K too. Otherwise it follows with Q and K, in the same graph."""
    session = active()
    session.select_kernels()
    if (session.overlap.head_groups or 1) > 1:
        warn_once(HEAD_GROUPS_IGNORED)
    layer = session.layers.traced_layer(path)
    gather = session.gather if num_gathered > 1 else None
    ulysses = UlyssesAttention(session.mesh, layer=layer.name if layer else "", gather=gather)
    session.begin_traced_call(TracedCall(OverlapSchedule(), layer=layer, ulysses=ulysses))
    sizes = layer.sizes.get(value.shape) if layer else None
    if sizes and session.sends_v_first(value):
        ulysses.layer_codecs = _codecs(session, layer, sizes, gather is not None)
        ulysses.start_value(value)
    return _new_ticket()


def _codecs(session: Session, layer: BaseLayer | None, sizes: LayerSizes, gathers_kv: bool) -> LayerCodecs | None:
    """Return the codecs of a call; None where its link references are those of the other exchange, as after an eager
    call that could not gather."""
    codecs = session.layer_codecs(layer, sizes, gathers_kv)
    return codecs if codecs and codecs.gathers_kv == gathers_kv else None


def _send_query_key(ticket: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Start the all-to-all of Q and K, and of V if it has not been sent."""
    session = active()
    call, sizes = session.traced_call, LayerSizes.of(query, key, value)
    if call.layer:
        call.layer.sizes[value.shape] = sizes
    call.ulysses.layer_codecs = _codecs(session, call.layer, sizes, call.ulysses.gather is not None)
    call.ulysses.start_inputs(query, key, value)
    return _new_ticket()


def _receive_heads(*_: Any) -> tuple[torch.Tensor, ...]:
    ulysses = active().traced_call.ulysses
    query, key, value = ulysses.wait_inputs(0)
    # Without fast axes, this is the Q that the operator was called with, and custom operators must not return inputs.
    is_input = ulysses.gather and not ulysses.gather.fast
    return query.clone() if is_input else query, key, value


def _send_output(ticket: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    active().traced_call.ulysses.start_output(output, 0)
    return _new_ticket()


def _receive_sequence(*_: Any) -> torch.Tensor:
    return active().end_traced_call()


# Fake implementations, which Dynamo traces for shapes.


def _new_ticket(*_: Any) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64)


def _heads_like(
    ticket: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    num_ranks: int,
    num_gathered: int,
) -> tuple[torch.Tensor, ...]:
    """Return tensors for Q (B, H/P, S/G, D), and K and V (B, H/P, S, D), of a rank's Q, K and V (B, H, S/(P G), D)."""
    ranks = num_ranks, num_ranks * num_gathered, num_ranks * num_gathered
    sizes = ((each, *each.shape, count) for each, count in zip((query, key, value), ranks, strict=True))
    return tuple(
        each.new_empty(batch, heads // num_ranks, tokens * count, head_dim)
        for each, batch, heads, tokens, head_dim, count in sizes
    )


def _define(schema: str, run: Callable, fake: Callable) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=_TAGS)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_LIBRARY.ns}::{name}", fake, lib=_LIBRARY)
    _register_effectful_op(getattr(torch.ops.cocodiff, name).default, _EffectType.ORDERED)


_define("send_value(Tensor value, str path, int num_gathered) -> Tensor", _send_value, _new_ticket)
_define("send_query_key(Tensor ticket, Tensor query, Tensor key, Tensor value) -> Tensor", _send_query_key, _new_ticket)
_define(
    "receive_heads(Tensor ticket, Tensor query, Tensor key, Tensor value, int num_ranks, int num_gathered) "
    "-> (Tensor, Tensor, Tensor)",
    _receive_heads,
    _heads_like,
)
_define("send_output(Tensor ticket, Tensor output) -> Tensor", _send_output, _new_ticket)
_define(
    "receive_sequence(Tensor ticket, Tensor output, int num_ranks) -> Tensor",
    _receive_sequence,
    lambda ticket, output, num_ranks: output_like(output, 1, num_ranks),
)
