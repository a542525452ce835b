"""Patches of xDiT's long-context attention, built on yunchang (StepVideo, Sana): V-First and codecs, as in USP.

Sizes in shapes: B batch, S sequence, H heads, D head dim.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from xfuser_cocodiff.engine.attention.reshard import pad_heads
from xfuser_cocodiff.engine.comm.head_group import HeadGroup
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.xdit.attention import eager_attention
from xfuser_cocodiff.xdit.attention.eager_attention import AttentionCall, AttentionInputs
from xfuser_cocodiff.xdit.patching import host
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.session.session import Session, active

_MODULE = "xfuser.core.long_ctx_attention.hybrid.attn_layer"
_TO_HEADS = 2, 1
"""Dims of (B, S, H, D) that its first all-to-all scatters and gathers."""
_HEADS = _TO_HEADS[0]
_is_resharded = False
"""Whether the plugin runs the all-to-alls around the forward that runs."""


def patches() -> list[Patch]:
    """Return the patches of the attention, and of the all-to-alls inside of it."""
    flat = functools.partial(_with_codecs, is_flat=True)
    return [
        Patch(
            "yunchang.comm.all_to_all",
            "all_to_all_4D",
            "the plugin runs the all-to-alls around long-context attention (StepVideo, Sana)",
            _unless_resharded,
            ("input", "scatter_idx", "gather_idx", "group", "use_sync"),
        ),
        Patch(_MODULE, "xFuserLongContextAttention.forward", "V-First, and codecs by layer", _with_codecs),
        Patch(_MODULE, "xFuserSanaLinearLongContextAttention.forward", "V-First, and codecs by layer", flat),
    ]


@dataclass(frozen=True)
class _Call(AttentionCall):
    """A call of the attention, always by heads."""

    given: AttentionInputs

    def inputs(self, gather: AxisPartition | None) -> AttentionInputs:
        return self.given


@contextlib.contextmanager
def _resharded() -> Iterator[None]:
    global _is_resharded
    _is_resharded = True
    try:
        yield
    finally:
        _is_resharded = False


def _unless_resharded(original: Callable) -> Callable:
    @functools.wraps(original)
    def all_to_all_4D(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: N802 (yunchang's name)
        return input if _is_resharded else original(input, *args, **kwargs)

    return all_to_all_4D


def _with_codecs(original: Callable, is_flat: bool = False) -> Callable:
    """Return the replacement of a forward of the attention.

    Args:
        original: forward of the attention.
        is_flat: whether it returns (B, S, H * D), rather than (B, S, H, D).
    """

    # Without the attributes that torch.compile sets: PyTorch 2.8 would find the original by them.
    @functools.wraps(original, updated=())
    def forward(
        module: Any, attn: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        session = active()
        if torch.compiler.is_compiling() or not _is_supported(module, query, key, value, options, session):
            return original(module, attn, query, key, value, **options)
        heads, degree, original_value = query.shape[_HEADS], session.mesh.topology.size, value.transpose(1, 2)
        padded = tuple(pad_heads(tensor, degree, _HEADS).transpose(1, 2) for tensor in (query, key, value))

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: HeadGroup) -> torch.Tensor:
            with _resharded():
                attended = original(module, attn, *(each.transpose(1, 2).contiguous() for each in (q, k, v)), **options)
            return (attended.unflatten(-1, (q.shape[1], -1)) if is_flat else attended).transpose(1, 2)

        session.select_kernels()
        call = _Call(AttentionInputs(padded, lambda *_: attend))
        with session.layers.in_usp(original_value) as in_flight:
            attended = eager_attention.attend(call, in_flight, session).transpose(1, 2)[:, :, :heads]
        return attended.flatten(2) if is_flat else attended.contiguous()

    is_traced = not getattr(original, "_torchdynamo_disable", False)
    return forward if is_traced else torch.compiler.disable(forward)


def _is_supported(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: dict[str, Any],
    session: Session,
) -> bool:
    """Return whether this module can compute the call, by values that are equal on every rank.

    No model of xDiT passes joint tensors any more.
    """
    return (
        session.mesh is not None
        and module.ulysses_pg is host.process_groups().ULYSSES_PG
        and (module.scatter_idx, module.gather_idx) == _TO_HEADS
        and not module.use_pack_qkv
        and options.get("joint_tensor_query") is None
        and query.shape[_HEADS] == key.shape[_HEADS]
        and all(tensor.ndim == 4 and tensor.dtype == query.dtype for tensor in (query, key, value))
    )
