"""The exchanges of an attention layer as operators, of which a compiled graph is made.

A graph calls them when it runs: there they are the exchanges of eager mode, with their plans, trials, codecs and
accounts. Their effects, and a ticket that leads from one to the next, keep them in one order, which all ranks share: so
one call is under way at a time. Tensors that an operator is given once more have to live until they are sent, and tell
it of what shape the answer is.

Sizes in shapes: P ranks, B batch, H heads, S sequence, D head dim.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from xfuser_cocodiff.engine.attention.overlap_schedule import OverlapSchedule
from xfuser_cocodiff.engine.attention.ulysses import Attend, AttentionAllToAlls, output_like
from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes
from xfuser_cocodiff.xdit.attention.schedule_choice import choose_schedules
from xfuser_cocodiff.xdit.attention.tracing import path
from xfuser_cocodiff.xdit.layers.layer_call import TracedCall
from xfuser_cocodiff.xdit.patching.log import warn_once
from xfuser_cocodiff.xdit.session.session import HEAD_GROUPS_IGNORED, active

_LIBRARY = torch.library.Library("cocodiff", "DEF")
_TAGS = (torch.Tag.cudagraph_unsafe,)
"""A CUDA graph would repeat what they did at one step."""


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attend: Attend,
    num_ranks: int,
) -> torch.Tensor:
    """Bring Q, K and V to the heads of this rank, attend, and bring O back, in a graph.

    Args:
        query: shape (B, H, S/P, D).
        key: the same, perhaps with fewer heads.
        value: as `key`.
        attend: what attention is.
        num_ranks: P.

    Returns:
        O, shape (B, H, S/P, D).
    """
    called = torch.ops.cocodiff
    ticket = called.send_value(value, path())
    ticket = called.send_query_key(ticket, query, key, value)
    q, k, v = called.receive_heads(ticket, query, key, value, num_ranks)
    output = attend(q, k, v, ALL_HEADS)
    ticket = called.send_output(ticket, output)
    return called.receive_sequence(ticket, output, num_ranks)


# What they do when a graph runs.


def _send_value(value: torch.Tensor, path: str) -> torch.Tensor:
    """V of a layer is there. Where that is to go first it is sent now, else with Q and K: the graph is the same."""
    session = active()
    session.select_kernels()
    if (session.overlap.head_groups or 1) > 1:
        warn_once(HEAD_GROUPS_IGNORED)
    layer = session.layers.traced_layer(path)
    signature = session.layers.signatures.of_graph(layer.name, value) if layer else None
    schedule = signature.candidates.schedule if signature and signature.candidates else OverlapSchedule()
    exchanges = AttentionAllToAlls(session.mesh_of(schedule), layer=layer.name if layer else "")
    session.begin_traced_call(TracedCall(schedule, signature, layer=layer, exchanges=exchanges))
    if schedule.v_first:
        exchanges.layer_codecs = session.layer_codecs(layer, signature.sizes)
        exchanges.start_value(value)
    return _a_ticket()


def _send_query_key(ticket: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Q and K are there too."""
    session = active()
    call, sizes = session.traced_call, LayerSizes.of(query, key, value)
    if call.signature:
        call.signature.sizes = sizes
        if call.signature.candidates is None:
            choose_schedules(call.signature, session, query, key, value)
    call.exchanges.layer_codecs = session.layer_codecs(call.layer, sizes)
    call.exchanges.start_inputs(query, key, value)
    return _a_ticket()


def _receive_heads(
    ticket: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    num_ranks: int,
) -> tuple[torch.Tensor, ...]:
    return active().traced_call.exchanges.wait_inputs(0)


def _send_output(ticket: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    active().traced_call.exchanges.start_output(output, 0)
    return _a_ticket()


def _receive_sequence(ticket: torch.Tensor, output: torch.Tensor, num_ranks: int) -> torch.Tensor:
    return active().end_traced_call()


# What Dynamo is told of them.


def _a_ticket(*_: Any) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64)


def _heads_like(
    ticket: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    num_ranks: int,
) -> tuple[torch.Tensor, ...]:
    """Tensors (B, H/P, S, D) for those (B, H, S/P, D)."""
    sizes = ((each, *each.shape) for each in (query, key, value))
    return tuple(
        each.new_empty(batch, heads // num_ranks, tokens * num_ranks, head_dim)
        for each, batch, heads, tokens, head_dim in sizes
    )


def _define(schema: str, run: Callable, fake: Callable) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=_TAGS)
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{_LIBRARY.ns}::{name}", fake, lib=_LIBRARY)
    _register_effectful_op(getattr(torch.ops.cocodiff, name).default, _EffectType.ORDERED)


_define("send_value(Tensor value, str path) -> Tensor", _send_value, _a_ticket)
_define("send_query_key(Tensor ticket, Tensor query, Tensor key, Tensor value) -> Tensor", _send_query_key, _a_ticket)
_define(
    "receive_heads(Tensor ticket, Tensor query, Tensor key, Tensor value, int num_ranks) -> (Tensor, Tensor, Tensor)",
    _receive_heads,
    _heads_like,
)
_define("send_output(Tensor ticket, Tensor output) -> Tensor", _send_output, _a_ticket)
_define(
    "receive_sequence(Tensor ticket, Tensor output, int num_ranks) -> Tensor",
    _receive_sequence,
    lambda ticket, output, num_ranks: output_like(output, 1, num_ranks),
)
