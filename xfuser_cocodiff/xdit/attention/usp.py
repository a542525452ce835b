"""Replacement of xDiT's USP whose all-to-alls overlap with computation: V-First, and heads in groups.

Sizes in shapes: P ranks of a Ulysses group, B batch, H heads, h heads of a head group, S sequence, D head dim.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from xfuser_cocodiff.engine.attention.reshard import HEADS, SEQUENCE, reshard
from xfuser_cocodiff.engine.attention.ring_attention import Ring, ring_attention
from xfuser_cocodiff.engine.attention.ulysses import Attend
from xfuser_cocodiff.engine.comm.comm_stream import Handle
from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS, HeadGroup
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs
from xfuser_cocodiff.xdit.attention import custom_ops
from xfuser_cocodiff.xdit.attention.eager_attention import AttentionInputs, scheduled_attention
from xfuser_cocodiff.xdit.attention.zero_padding import can_pad, drop_padding, pad_to_divisible
from xfuser_cocodiff.xdit.patching import host
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.session import usp_versions
from xfuser_cocodiff.xdit.session.graph_order import add_send_pass
from xfuser_cocodiff.xdit.session.session import Session, active

_SPARSE = "SPAR", "VSA", "BLOCK"
"""Parts of the names of xDiT's backends that select keys by blocks of the whole sequence's queries."""
_UNQUANTIZED = (
    *("SDPA", "SDPA_MATH", "SDPA_EFFICIENT", "SDPA_FLASH", "FLASH", "CUDNN", "FLASH_3", "FLASH_4"),
    *("AITER", "AITER_BF16", "AITER_FLYDSL", "NPU"),
)
"""xDiT's backends that compute with the values as they are, and attend to all keys."""


def patches() -> list[Patch]:
    """Return the patch of USP; none if the installed USP is unknown."""
    patch = Patch(usp_versions.MODULE, "USP", "V-First and head groups", _with_overlap)
    return [patch] if usp_versions.is_known() else []


@dataclass(frozen=True)
class _USPArguments:
    """Arguments of a USP call besides Q, K and V."""

    dropout_p: float = 0.0
    is_causal: bool = False
    joint_query: torch.Tensor | None = None
    joint_key: torch.Tensor | None = None
    joint_value: torch.Tensor | None = None
    joint_strategy: str | None = None
    attn_layer: Any = None
    combine_qkv_a2a: bool | None = None
    backend: Any = None
    attention_kwargs: dict | None = None
    head_balance_layer: Any = None
    kv_head_repeat: int = 1


def _with_overlap(original: Callable) -> Callable:
    @functools.wraps(original)
    def USP(  # noqa: N802 (xDiT's name)
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        session = active()
        is_compiling = torch.compiler.is_compiling()
        if session.mesh is None and (session.simulator is None or is_compiling):
            return original(query, key, value, *args, **kwargs)
        arguments = _USPArguments(*args, **kwargs)
        if session.mesh is None:
            session.select_kernels()
            tensors = query, key, value
            return session.simulator.attention(original, tensors, arguments, _can_gather(arguments), session)
        attend = _compiled_attention if is_compiling else _eager_attention
        output = attend(original, query, key, value, arguments, session)
        return output if output.shape[HEADS] == query.shape[HEADS] else output[:, : query.shape[HEADS]]

    return USP


def _compiled_attention(
    original: Callable,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    arguments: _USPArguments,
    session: Session,
) -> torch.Tensor:
    """Compute attention in a compiled graph: by custom operators, or by functional collectives on devices whose graphs
    are faster with those."""
    mesh = session.mesh
    if not _is_supported(query, key, value, arguments, session):
        return original(query, key, value, **vars(arguments))
    if mesh.topology.size == 1 or not add_send_pass():
        (query, key, value), arguments = _padded(query, key, value, arguments, mesh.topology.size)
        return original(query, key, value, **vars(arguments))
    gathers_kv = _can_gather(arguments) and session.gathers_kv(query, key)
    inputs = _inputs(query, key, value, arguments, session, session.gather if gathers_kv else None)
    query, key, value = inputs.tensors
    attend = inputs.attend_with(None, "")
    if session.uses_custom_ops:
        num_gathered = session.gather.num_slow if gathers_kv else 1
        return custom_ops.attention(query, key, value, attend, session.head_degree(gathers_kv), num_gathered)
    if session.sends_v_first(value):
        [value] = reshard([value], HEADS, SEQUENCE, mesh)
        query, key = reshard([query, key], HEADS, SEQUENCE, mesh)
    else:
        query, key, value = reshard([query, key, value], HEADS, SEQUENCE, mesh)
    return reshard([attend(query, key, value, ALL_HEADS)], SEQUENCE, HEADS, mesh)[0]


def _is_supported(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: _USPArguments, session: Session
) -> bool:
    """Return whether this module can compute the call; xDiT computes others, over the plugin's all-to-all.

    Depends only on values that are equal on every rank.
    """
    mesh, tensors = session.mesh, [query, key, value]
    if arguments.joint_strategy:
        tensors.append(arguments.joint_query)
    return (
        all(tensor.ndim == 4 and tensor.dtype == query.dtype for tensor in tensors)
        and (can_pad(query, key) or all(tensor.shape[HEADS] % mesh.topology.size == 0 for tensor in tensors))
        and arguments.joint_strategy in (None, "front", "rear")
        and not host.usp()._ulysses_extra_inputs(arguments.attention_kwargs, query)
        and not _communicates_in_fp8(arguments, session)
        and not _balances_heads(arguments, session)
    )


def _communicates_in_fp8(arguments: _USPArguments, session: Session) -> bool:
    """Return whether xDiT communicates in FP8 in this call.

    The codecs of a lossy mode replace that once xDiT has measured the scales in a lossless run of its own.
    """
    state = host.runtime_state().fp8_comms
    module = arguments.head_balance_layer if arguments.attn_layer is None else arguments.attn_layer
    if state is None or module is None or arguments.joint_strategy:
        return False
    if session.runtime is None:
        return True
    model = state.get_model_state(getattr(module, "fp8_comms_owner", None))
    return model is not None and not model.synced


def _balances_heads(arguments: _USPArguments, session: Session) -> bool:
    """Return whether xDiT moves heads between ranks at each step to balance sparse attention."""
    state = host.runtime_state()
    backend = state.attention_backend if arguments.backend is None else arguments.backend
    balances = (
        state.runtime_config.use_spargeattn_head_balance
        and backend in host.usp()._HEAD_BALANCE_BACKENDS
        and getattr(arguments.head_balance_layer, "head_perm", None) is not None
        and arguments.joint_strategy is None
    )
    if balances and session.runtime:
        session.runtime.inactive_reason = (
            "--use_spargeattn_head_balance moves heads between ranks at each step; leave it out to compress"
        )
    return balances


def _eager_attention(
    original: Callable,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    arguments: _USPArguments,
    session: Session,
) -> torch.Tensor:
    """Compute attention in eager mode, by the schedule of the layer."""
    session.select_kernels()
    with session.layers.in_usp(value) as in_flight:
        if _is_supported(query, key, value, arguments, session):
            return _scheduled_attention(query, key, value, in_flight, arguments, session)
        if in_flight:
            in_flight.drain()
        return original(query, key, value, **vars(arguments))


def _scheduled_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    in_flight: Handle | None,
    arguments: _USPArguments,
    session: Session,
) -> torch.Tensor:
    """Compute attention by the schedule of the layer.

    Args:
        query: shape (B, H, S/P, D).
        key: as `query`, possibly with fewer heads.
        value: as `key`.
        in_flight: handle of V if its all-to-all is in flight already.
        arguments: other arguments of USP.
        session: active session.

    Returns:
        O, shape (B, H, S/P, D).
    """
    # xDiT keeps K and V of all heads at once. In a lossless mode, a backend that quantizes would scale parts apart.
    can_split_heads = not _keeps_kv(arguments.attn_layer) and (
        session.runtime is not None or host.backend_name(arguments.backend) in _UNQUANTIZED
    )
    can_gather = can_split_heads and _can_gather(arguments)
    gathers_kv = can_gather and session.gathers_kv(query, key)
    ring = None if arguments.is_causal else session.ring
    inputs_for = functools.partial(_inputs, query, key, value, arguments, session, ring=ring)
    return scheduled_attention(inputs_for, in_flight, session, can_split_heads, gathers_kv, can_gather)


def _can_gather(arguments: _USPArguments) -> bool:
    """Return whether attention may have fewer queries than keys: neither a mask nor the selection of keys in sparse
    attention depends on the index of a query."""
    mask = (arguments.attention_kwargs or {}).get("attn_mask")
    is_general = mask is not None and not (isinstance(mask, torch.Tensor) and set(mask.shape[-3:-1]) <= {1})
    is_sparse = any(word in host.backend_name(arguments.backend) for word in _SPARSE)
    return not (arguments.is_causal or is_general or is_sparse)


def _inputs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    arguments: _USPArguments,
    session: Session,
    gather: AxisPartition | None = None,
    ring: Ring | None = None,
) -> AttentionInputs:
    """Return what attention needs, with heads zero-padded where the ranks that share them do not divide them.

    Args:
        query: shape (B, H, S/P, D).
        key: as `query`, possibly with fewer heads.
        value: as `key`.
        arguments: other arguments of USP.
        session: active session.
        gather: axes along which K and V are gathered; None to divide the heads over all ranks.
        ring: ranks of a ring, over which K and V move along the topology.
    """
    degree = gather.num_fast if gather else session.mesh.topology.size
    (query, key, value), arguments = _padded(query, key, value, arguments, degree)
    query = _join_query(query, key, value, arguments, gather)
    attend_with = functools.partial(_attention_function, arguments, ring, session.padding, gather)
    return AttentionInputs((query, key, value), attend_with)


def _padded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: _USPArguments, degree: int
) -> tuple[list[torch.Tensor], _USPArguments]:
    if any(tensor.shape[HEADS] % degree for tensor in (query, key)):
        return pad_to_divisible([query, key, value], arguments, degree)
    return [query, key, value], arguments


def _keeps_kv(attn_layer: Any) -> bool:
    """Return whether xDiT keeps K and V of a layer for PipeFusion. With one patch it would copy and never read them."""
    return host.usp()._has_kv_cache(attn_layer) and host.has_patches()


def _join_query(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    arguments: _USPArguments,
    gather: AxisPartition | None,
) -> torch.Tensor:
    """Return Q as USP sends it: together with the joint query, if there is one."""
    if gather is None:  # else heads need not be divisible by the Ulysses degree
        host.usp()._validate_gqa_params(query, key, value, arguments.kv_head_repeat, arguments.joint_strategy)
    if arguments.joint_strategy:
        query = host.usp()._concat_joint_tensor(query, arguments.joint_query, arguments.joint_strategy, dim=2)
    return query


def _attention_function(
    arguments: _USPArguments,
    ring: Ring | None = None,
    padding: int = 0,
    gather: AxisPartition | None = None,
    ring_codecs: LayerCodecs | None = None,
    layer: str = "",
) -> Attend:
    """Return the attention that USP computes between its all-to-alls.

    Args:
        arguments: arguments of USP besides Q, K and V.
        ring: ranks of a ring, over which K and V move along the topology; None leaves a ring to xDiT.
        padding: number of tokens at the end of the sequence that attention has to leave out.
        gather: axes along which K and V are gathered; None where heads are divided over all ranks.
        ring_codecs: codecs of K and V in the ring; lossless when not given.
        layer: name of the layer.
    """
    function = host.usp()._get_attention_function(backend=arguments.backend)
    ring_degree = host.ring_degree()
    joint: tuple[Any, Any] = (None, None)
    if arguments.joint_strategy:
        joint = arguments.joint_key, arguments.joint_value
        if gather:
            own_heads = HeadGroup(gather.fast_index, gather.num_fast)
            joint = own_heads.of(joint[0], HEADS), own_heads.of(joint[1], HEADS)
        else:
            joint = host.usp()._preprocess_joint_tensors(*joint)

    def repeat_heads(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if arguments.kv_head_repeat == 1:
            return key, value
        return host.usp()._repeat_kv_heads(key, value, arguments.kv_head_repeat)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_group: HeadGroup) -> torch.Tensor:
        if _keeps_kv(arguments.attn_layer):
            key, value = host.usp()._update_and_get_kv_cache(key, value, arguments.attn_layer)
        key, value = host.usp()._trim_trailing_kv_padding(key, value, arguments.attention_kwargs)

        def options(step: int) -> dict[str, Any]:
            return _function_options(arguments, joint, head_group, ring_degree, step)

        def attend_block(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, step: int, rank: int
        ) -> tuple[torch.Tensor, torch.Tensor]:
            key, value = drop_padding(key, value, padding if rank == ring_degree - 1 else 0)  # at the sequence's end
            output, lse, *_ = function(query, *repeat_heads(key, value), **options(step))
            return output, lse

        if ring:
            return ring_attention(query, key, value, attend_block, ring, layer, head_group, ring_codecs)
        if ring_degree > 1:  # xDiT's ring attention needs blocks of equal size, so padding remains
            return host.usp().ring_attn(function, query, *repeat_heads(key, value), **options(0))
        key, value = drop_padding(key, value, padding)
        return function(query, *repeat_heads(key, value), **options(0))[0]

    return attend


def _function_options(
    arguments: _USPArguments, joint: tuple[Any, Any], head_group: HeadGroup, ring_degree: int, step: int
) -> dict[str, Any]:
    """Return the keyword arguments of xDiT's attention function at one step of a ring."""
    return {
        "dropout_p": arguments.dropout_p,
        "is_causal": arguments.is_causal,
        "attention_kwargs": arguments.attention_kwargs,
        "joint_attn_kwargs": arguments.joint_strategy
        and {
            "joint_key": head_group.of(joint[0], HEADS),
            "joint_value": head_group.of(joint[1], HEADS),
            "joint_strategy": arguments.joint_strategy,
            "step": step,
            "total_steps": ring_degree,
        },
    }
