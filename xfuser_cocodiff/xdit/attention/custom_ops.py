"""Attention as a custom operator for compiled graphs in lossy modes.

When a graph runs, the operator does what eager mode does, but for V-First and timed schedules. Ordered effects keep the
operators of a graph in one order, the same on all ranks.
"""

import ast
from typing import Any

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from xfuser_cocodiff.engine.attention.reshard import HEADS
from xfuser_cocodiff.xdit.attention import eager_attention
from xfuser_cocodiff.xdit.attention.tracing import traced_path
from xfuser_cocodiff.xdit.attention.usp_call import USPCall
from xfuser_cocodiff.xdit.patching import host
from xfuser_cocodiff.xdit.session.session import active

_LIBRARY = torch.library.Library("cocodiff", "DEF")
_JOINT = ("joint_query", "joint_key", "joint_value")


def supports(call: USPCall) -> bool:
    """Return whether the operator can take the call's arguments: operators have no dicts of any values."""
    kinds = torch.Tensor, int, float, str, type(None)
    return all(isinstance(value, kinds) for value in (call.attention_kwargs or {}).values())


def attention(call: USPCall) -> torch.Tensor:
    """Compute a call of USP in a compiled graph, and return O, (B, H, S/P, D)."""
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, int] = {}
    constants: dict[str, Any] = {}
    for name in _JOINT:
        if getattr(call, name) is not None:
            tensors[name] = getattr(call, name)
    for name, value in (call.attention_kwargs or {}).items():
        if isinstance(value, torch.Tensor):
            tensors[f".{name}"] = value
        elif isinstance(value, int) and not isinstance(value, bool):
            numbers[name] = value  # perhaps symbolic
        else:
            constants[name] = value
    backend = None if call.backend is None else call.backend.name
    options = _encode(
        *(call.dropout_p, call.is_causal, call.joint_strategy, backend, call.kv_head_repeat),
        *(tuple(tensors), tuple(numbers), tuple(constants), tuple(constants.values())),
    )
    given = call.query, call.key, call.value, [*tensors.values()], [*numbers.values()], call.padding
    return torch.ops.cocodiff.attention(*given, options, traced_path())


def _encode(*options: Any) -> str:
    return repr(options)


_encode._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a constant of the graph


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tensors: list[torch.Tensor],
    numbers: list[int],
    padding: int,
    options: str,
    path: str,
) -> torch.Tensor:
    """Compute attention when a graph runs."""
    session, usp = active(), host.usp()
    dropout_p, is_causal, strategy, backend, repeat, *names = ast.literal_eval(options)
    tensor_names, number_names, constant_names, constants = names
    named = dict(zip(tensor_names, tensors, strict=True))
    attention_kwargs = {name[1:]: tensor for name, tensor in named.items() if name[0] == "."}
    attention_kwargs |= dict(zip((*number_names, *constant_names), (*numbers, *constants), strict=True))
    call = USPCall(
        usp.USP.__wrapped__,
        session,
        padding,
        query,
        key,
        value,
        dropout_p=dropout_p,
        is_causal=is_causal,
        **{name: named[name] for name in _JOINT if name in named},
        joint_strategy=strategy,
        backend=backend and type(host.runtime_state().attention_backend)[backend],
        attention_kwargs=attention_kwargs or None,
        kv_head_repeat=repeat,
    )
    session.select_kernels()
    with session.layers.in_graph(path):
        return eager_attention.attend(call, None, session)[:, : query.shape[HEADS]].contiguous()


def _fake(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, tensors: list[torch.Tensor], *others: Any
) -> torch.Tensor:
    """Return a tensor of O's shape: that of Q, with the tokens of a joint Q."""
    names, (batch, heads, tokens, head_dim) = ast.literal_eval(others[-2])[5], query.shape
    joint = tensors[names.index("joint_query")].shape[2] if "joint_query" in names else 0
    return query.new_empty(batch, heads, tokens + joint, head_dim)


_LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor[] tensors, SymInt[] numbers, SymInt padding, "
    "str options, str path) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),  # CUDA graphs would repeat the messages of one step
)
_LIBRARY.impl("attention", _attention, "CompositeExplicitAutograd")
torch.library.register_fake("cocodiff::attention", _fake, lib=_LIBRARY)
_register_effectful_op(torch.ops.cocodiff.attention.default, _EffectType.ORDERED)
