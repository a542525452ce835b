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
_CONSTANTS = (int, float, str, type(None))
"""Types that a graph has as constants or numbers."""
_SEQUENCES = (tuple, list)


def supports(call: USPCall) -> bool:
    """Return whether the operator can take the call's arguments: operators have no dicts of any values."""
    kinds = torch.Tensor, *_CONSTANTS
    return all(
        isinstance(value, kinds)
        or (isinstance(value, _SEQUENCES) and all(isinstance(each, _CONSTANTS) for each in value))
        for value in (call.attention_kwargs or {}).values()
    )


def attention(call: USPCall) -> torch.Tensor:
    """Compute a call of USP in a compiled graph, and return O, (B, H, S/P, D)."""
    tensors: dict[str, torch.Tensor] = {}
    numbers: list[int] = []
    options: dict[str, Any] = {}
    for name in _JOINT:
        if getattr(call, name) is not None:
            tensors[name] = getattr(call, name)
    for name, value in (call.attention_kwargs or {}).items():
        if isinstance(value, torch.Tensor):
            tensors[f".{name}"] = value
        elif isinstance(value, _SEQUENCES):
            options[name] = [_option(each, numbers) for each in value]
        else:
            options[name] = _option(value, numbers)
    backend = None if call.backend is None else call.backend.name
    constants = _encode(
        *(call.dropout_p, call.is_causal, call.joint_strategy, backend, call.kv_head_repeat),
        *(tuple(tensors), options),
    )
    given = call.query, call.key, call.value, [*tensors.values()], numbers
    return torch.ops.cocodiff.attention(*given, constants, traced_path())


def _option(value: Any, numbers: list[int]) -> tuple:
    """Return a value as a constant of the graph; of an integer, which may be symbolic, its index in `numbers`."""
    if isinstance(value, int) and not isinstance(value, bool):
        numbers.append(value)
        return "number", len(numbers) - 1
    return "constant", value


def _value(option: Any, numbers: list[int]) -> Any:
    """Return the value of an option; see :func:`_option`. Sequences are tuples."""
    if isinstance(option, list):
        return tuple(_value(each, numbers) for each in option)
    kind, value = option
    return numbers[value] if kind == "number" else value


def _encode(*constants: Any) -> str:
    return repr(constants)


_encode._dynamo_marked_constant = True  # type: ignore[attr-defined]  # a constant of the graph


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tensors: list[torch.Tensor],
    numbers: list[int],
    constants: str,
    path: str,
) -> torch.Tensor:
    """Compute attention when a graph runs."""
    session, usp = active(), host.usp()
    dropout_p, is_causal, strategy, backend, repeat, names, options = ast.literal_eval(constants)
    named = dict(zip(names, tensors, strict=True))
    attention_kwargs = {name[1:]: tensor for name, tensor in named.items() if name[0] == "."}
    attention_kwargs |= {name: _value(option, numbers) for name, option in options.items()}
    call = USPCall(
        usp.USP.__wrapped__,
        session,
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
    "attention(Tensor query, Tensor key, Tensor value, Tensor[] tensors, SymInt[] numbers, "
    "str constants, str path) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),  # CUDA graphs would repeat the messages of one step
)
_LIBRARY.impl("attention", _attention, "CompositeExplicitAutograd")
torch.library.register_fake("cocodiff::attention", _fake, lib=_LIBRARY)
_register_effectful_op(torch.ops.cocodiff.attention.default, _EffectType.ORDERED)
