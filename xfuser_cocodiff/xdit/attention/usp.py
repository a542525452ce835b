"""xDiT's USP over exchanges that overlap: V first, and heads in groups."""

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
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes
from xfuser_cocodiff.xdit.attention import custom_ops
from xfuser_cocodiff.xdit.attention.eager_attention import scheduled_attention, started_value
from xfuser_cocodiff.xdit.attention.segments import segments
from xfuser_cocodiff.xdit.attention.zero_padding import can_pad, drop_padding, pad_to_divisible
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.session import usp_versions
from xfuser_cocodiff.xdit.session.graph_order import order_exchanges
from xfuser_cocodiff.xdit.session.session import Session, active


def patches() -> list[Patch]:
    """Return the row that puts the attention in place of the one that is known."""
    row = Patch(usp_versions.MODULE, "USP", "V goes first, heads go in groups", _usp)
    return [row] if usp_versions.is_known() else []


@dataclass(frozen=True)
class _Given:
    """What USP was called with, beside Q, K and V."""

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


def _usp(original: Callable) -> Callable:
    @functools.wraps(original)
    def USP(  # noqa: N802 (xDiT's name)
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        session = active()
        if session.mesh is None and (session.virtual is None or torch.compiler.is_compiling()):
            return original(query, key, value, *args, **kwargs)
        given = _Given(*args, **kwargs)
        if session.mesh is None:
            session.select_kernels()
            return _virtually(original, query, key, value, given, session)
        is_traced = torch.compiler.is_compiling()
        under_way = None if is_traced else started_value(value, session)
        if not _ours(query, key, value, given, session):
            if under_way:
                under_way.drain()
            return original(query, key, value, *args, **kwargs)
        heads = query.shape[HEADS]
        if any(tensor.shape[HEADS] % session.mesh.topology.size for tensor in (query, key)):
            (query, key, value), given = pad_to_divisible([query, key, value], given, session.mesh.topology.size)
        if is_traced:
            result = _traced(original, query, key, value, given, session)
        else:
            result = _attention(query, key, value, under_way, given, session)
        return result if result.shape[HEADS] == heads else result[:, :heads]

    return USP


def _traced(
    original: Callable, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: _Given, session: Session
) -> torch.Tensor:
    """Attention in a graph, of operators; of what PyTorch can trace where a device's graphs would be the poorer."""
    mesh = session.mesh
    if mesh.topology.size == 1 or not order_exchanges():
        return original(query, key, value, **vars(given))
    query, attend = _prepared(query, key, value, given), _attend(given, padding=session.padding)
    if session.uses_custom_ops:
        return custom_ops.attention(query, key, value, attend, mesh.topology.size)
    if session.sends_v_first(value):
        [value] = reshard([value], HEADS, SEQUENCE, mesh)
        query, key = reshard([query, key], HEADS, SEQUENCE, mesh)
    else:
        query, key, value = reshard([query, key, value], HEADS, SEQUENCE, mesh)
    return reshard([attend(query, key, value, ALL_HEADS)], SEQUENCE, HEADS, mesh)[0]


def _virtually(
    original: Callable, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: _Given, session: Session
) -> torch.Tensor:
    """Attention of one rank, with what codecs would leave of its tensors among many."""
    session.layers.discover()
    virtual, layer = session.virtual, session.layers.running_layer()
    layer_codecs = None
    if layer and not given.joint_strategy and not query.shape[2] == key.shape[2] == value.shape[2]:
        session.runtime.disable("K and V have other tokens than Q, and their distribution over ranks is unknown")
    elif layer and not given.joint_strategy:
        layer.count_call()
        parts = segments(layer.root.transformer, layer.root.shapes, query.shape[2])
        sizes = LayerSizes.of(query, key, value, fraction=virtual.shard_fraction(query.shape, parts))
        layer_codecs = session.layer_codecs(layer, sizes)
    if layer_codecs is None:
        return original(query, key, value, **vars(given))
    attention = functools.partial(original, **vars(given))
    return virtual.attend([query, key, value], parts, layer_codecs, attention)


def _ours(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: _Given, session: Session) -> bool:
    """Whether this call is one that is understood here; by what is the same on every rank. xDiT does the others, whose
    exchanges run along the topology all the same."""
    from xfuser.model_executor.layers import usp

    mesh, tensors = session.mesh, [query, key, value]
    if given.joint_strategy:
        tensors.append(given.joint_query)
    return (
        all(tensor.ndim == 4 and tensor.dtype == query.dtype for tensor in tensors)
        and (can_pad(query, key) or all(tensor.shape[HEADS] % mesh.topology.size == 0 for tensor in tensors))
        and given.joint_strategy in (None, "front", "rear")
        and not usp._ulysses_extra_inputs(given.attention_kwargs, query)
        and not _in_fp8(given, session)
        and not _permutes_heads(given, session)
    )


def _in_fp8(given: _Given, session: Session) -> bool:
    """Whether this call's exchanges are in 8 bits by xDiT. A mode that approximates has codecs in their place, once
    xDiT has seen in a run of its own how large values are."""
    from xfuser.core.distributed import get_runtime_state

    state = get_runtime_state().fp8_comms
    module = given.head_balance_layer if given.attn_layer is None else given.attn_layer
    if state is None or module is None or given.joint_strategy:
        return False
    if session.runtime is None:
        return True
    model = state.get_model_state(getattr(module, "fp8_comms_owner", None))
    return model is not None and not model.synced


def _permutes_heads(given: _Given, session: Session) -> bool:
    """Whether xDiT gives each rank other heads at every step, so that all have as much to do."""
    from xfuser.core.distributed import get_runtime_state
    from xfuser.model_executor.layers import usp

    state = get_runtime_state()
    backend = state.attention_backend if given.backend is None else given.backend
    permutes = (
        state.runtime_config.use_spargeattn_head_balance
        and backend in usp._HEAD_BALANCE_BACKENDS
        and getattr(given.head_balance_layer, "head_perm", None) is not None
        and given.joint_strategy is None
    )
    if permutes and session.runtime:
        session.runtime.disable(
            "--use_spargeattn_head_balance moves heads between ranks at each step; leave it out to compress"
        )
    return permutes


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    under_way: Handle | None,
    given: _Given,
    session: Session,
) -> torch.Tensor:
    from xfuser.model_executor.layers import usp

    query = _prepared(query, key, value, given)
    cuts_heads = not usp._has_kv_cache(given.attn_layer)  # which holds all heads of the layer
    attend_by = functools.partial(_attend, given, None if given.is_causal else session.ring, session.padding)
    return scheduled_attention(query, key, value, attend_by, under_way, session, cuts_heads)


def _prepared(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: _Given) -> torch.Tensor:
    """Q as USP sends it."""
    from xfuser.model_executor.layers import usp

    usp._validate_gqa_params(query, key, value, given.kv_head_repeat, given.joint_strategy)
    if given.joint_strategy:
        query = usp._concat_joint_tensor(query, given.joint_query, given.joint_strategy, dim=2)
    return query


def _attend(
    given: _Given,
    around: Ring | None = None,
    padding: int = 0,
    ring_codecs: LayerCodecs | None = None,
    layer: str = "",
) -> Attend:
    """Attention as USP has it between its exchanges.

    Args:
        given: what USP was called with.
        around: the ranks of a ring, by which K and V come along the topology; by xDiT's own where there are none.
        padding: tokens at the end of the sequence that are not to be seen.
        ring_codecs: how they are encoded.
        layer: its name.
    """
    from xfuser.core.distributed import get_ring_parallel_world_size
    from xfuser.model_executor.layers import usp

    function = usp._get_attention_function(backend=given.backend)
    ring = get_ring_parallel_world_size()
    joint = usp._preprocess_joint_tensors(given.joint_key, given.joint_value) if given.joint_strategy else (None, None)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_group: HeadGroup) -> torch.Tensor:
        if usp._has_kv_cache(given.attn_layer):
            key, value = usp._update_and_get_kv_cache(key, value, given.attn_layer)
        key, value = usp._trim_trailing_kv_padding(key, value, given.attention_kwargs)

        def options(place: int) -> dict[str, Any]:
            return {
                "dropout_p": given.dropout_p,
                "is_causal": given.is_causal,
                "attention_kwargs": given.attention_kwargs,
                "joint_attn_kwargs": given.joint_strategy
                and {
                    "joint_key": head_group.of(joint[0], HEADS),
                    "joint_value": head_group.of(joint[1], HEADS),
                    "joint_strategy": given.joint_strategy,
                    "step": place,
                    "total_steps": ring,
                },
            }

        def attend_block(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, place: int
        ) -> tuple[torch.Tensor, torch.Tensor]:
            is_last = around.order[place] == ring - 1  # of the sequence
            key, value = drop_padding(key, value, padding if is_last else 0)
            output, lse, *_ = function(query, *repeated(key, value), **options(place))
            return output, lse

        if around:
            return ring_attention(query, key, value, attend_block, around, layer, head_group, ring_codecs)
        if ring > 1:  # of which xDiT's wants blocks that are alike
            return usp.ring_attn(function, query, *repeated(key, value), **options(0))
        key, value = drop_padding(key, value, padding)
        return function(query, *repeated(key, value), **options(0))[0]

    def repeated(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if given.kv_head_repeat == 1:
            return key, value
        return usp._repeat_kv_heads(key, value, given.kv_head_repeat)

    return attend
