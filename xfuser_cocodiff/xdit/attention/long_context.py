"""Patches of xDiT's long-context attention, built on yunchang (StepVideo, Sana): V-First and codecs, as in USP.

Sizes in shapes: B batch, S sequence, H heads, D head dim.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from xfuser_cocodiff.engine.attention.reshard import pad_heads, reshard
from xfuser_cocodiff.engine.comm.head_group import HeadGroup
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.xdit.attention import eager_attention
from xfuser_cocodiff.xdit.attention.all_to_all import is_supported
from xfuser_cocodiff.xdit.attention.eager_attention import AttentionCall, AttentionInputs
from xfuser_cocodiff.xdit.patching import host
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.session.session import Session, active

_MODULE = "xfuser.core.long_ctx_attention.hybrid.attn_layer"
_TO_HEADS = 2, 1
"""Dims of (B, S, H, D) that its first all-to-all scatters and gathers."""
_HEADS = _TO_HEADS[0]
_JOINT = ("joint_tensor_query", "joint_tensor_key", "joint_tensor_value")


def patches() -> list[Patch]:
    """Return the patches of the all-to-all, and of the attention around it."""
    all_to_all = _AllToAll()
    return [
        Patch(
            "yunchang.comm.all_to_all",
            "all_to_all_4D",
            "all-to-all of long-context attention (StepVideo, Sana)",
            all_to_all.replace,
            ("input", "scatter_idx", "gather_idx", "group", "use_sync"),
        ),
        *(
            Patch(_MODULE, f"{name}.forward", "V-First, and codecs by layer", replace)
            for name, replace in (
                ("xFuserLongContextAttention", all_to_all.replace_forward),
                ("xFuserSanaLinearLongContextAttention", functools.partial(all_to_all.replace_forward, is_flat=True)),
            )
        ),
    ]


@dataclass(frozen=True)
class _Call(AttentionCall):
    """A call of the attention, always by heads."""

    given: AttentionInputs

    def inputs(self, gather: AxisPartition | None) -> AttentionInputs:
        return self.given


class _AllToAll:
    """All-to-all of yunchang, which the forward of the attention calls for Q, K, V and O.

    While the plugin runs the all-to-alls around a forward, the calls inside of it return their input.
    """

    def __init__(self) -> None:
        self._is_disabled = False

    @contextmanager
    def _disabled(self) -> Iterator[None]:
        before, self._is_disabled = self._is_disabled, True
        try:
            yield
        finally:
            self._is_disabled = before

    def replace(self, original: Callable) -> Callable:
        """Return the replacement of yunchang's all-to-all of one tensor."""

        @functools.wraps(original)
        def all_to_all_4D(  # noqa: N802 (yunchang's name)
            input: torch.Tensor,
            scatter_idx: int = 2,
            gather_idx: int = 1,
            group: dist.ProcessGroup | None = None,
            use_sync: bool = False,
        ) -> torch.Tensor:
            if self._is_disabled:
                return input
            mesh = active().mesh if _is_ulysses(group) else None
            if {scatter_idx, gather_idx} != {1, 2} or use_sync or not is_supported((input,), scatter_idx, mesh):
                return original(input, scatter_idx, gather_idx, group, use_sync)
            return reshard([input], scatter_idx, gather_idx, mesh)[0]

        return all_to_all_4D

    def replace_forward(self, original: Callable, is_flat: bool = False) -> Callable:
        """Return the replacement of a forward of the attention.

        Args:
            original: forward of the attention.
            is_flat: whether it returns (B, S, H * D), rather than (B, S, H, D).
        """

        # Without the attributes that torch.compile sets: PyTorch 2.8 would find the original by them.
        @functools.wraps(original, updated=())
        def forward(
            module: Any,
            attn: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            **options: Any,
        ) -> torch.Tensor:
            session = active()
            if torch.compiler.is_compiling() or not _is_call_supported(module, query, key, value, session):
                return original(module, attn, query, key, value, **options)
            heads, degree, original_value = query.shape[_HEADS], session.mesh.topology.size, value.transpose(1, 2)
            query, key, value = (pad_heads(tensor, degree, _HEADS) for tensor in (query, key, value))
            options |= {
                name: pad_heads(text, degree, _HEADS)
                for name, text in options.items()
                if name in _JOINT and text is not None
            }
            if (joint := options.get("joint_tensor_query")) is not None:
                query = torch.cat([query, joint] if options["joint_strategy"] == "rear" else [joint, query], 1)
            query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))

            def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: HeadGroup) -> torch.Tensor:
                head_sharded = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
                if joint is not None:  # the joint Q is in Q already, joint K and V are not
                    options["joint_tensor_query"] = head_sharded[0][:, :0]
                with self._disabled():
                    attended = original(module, attn, *head_sharded, **options)
                if is_flat:
                    attended = attended.unflatten(-1, (q.shape[1], -1))
                return attended.transpose(1, 2)

            session.select_kernels()
            call = _Call(AttentionInputs((query, key, value), lambda *_: attend))
            with session.layers.in_usp(original_value) as in_flight:
                attended = eager_attention.attend(call, in_flight, session).transpose(1, 2)
            attended = attended[:, :, :heads]
            return attended.flatten(2) if is_flat else attended.contiguous()

        is_traced = not getattr(original, "_torchdynamo_disable", False)
        return forward if is_traced else torch.compiler.disable(forward)


def _is_ulysses(group: dist.ProcessGroup | None) -> bool:
    return group is host.process_groups().ULYSSES_PG


def _is_call_supported(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, session: Session
) -> bool:
    """Return whether this module can compute the call, by values that are equal on every rank."""
    return (
        session.mesh is not None
        and _is_ulysses(module.ulysses_pg)
        and (module.scatter_idx, module.gather_idx) == _TO_HEADS
        and not module.use_pack_qkv
        and query.shape[_HEADS] == key.shape[_HEADS]
        and all(tensor.ndim == 4 and tensor.dtype == query.dtype for tensor in (query, key, value))
    )
