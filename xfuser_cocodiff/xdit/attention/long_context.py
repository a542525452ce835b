"""xDiT's long-context attention, which is built on yunchang (StepVideo, Sana): as USP, with V first and codecs."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from xfuser_cocodiff.engine.attention.reshard import pad_heads, reshard
from xfuser_cocodiff.engine.comm.head_group import HeadGroup
from xfuser_cocodiff.xdit.attention.eager_attention import early_value, scheduled_attention
from xfuser_cocodiff.xdit.attention.patch_points import fits
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.session.session import Session, active

_MODULE = "xfuser.core.long_ctx_attention.hybrid.attn_layer"
_TO_HEADS = 2, 1
"""Dims of (B, S, H, D) that its first exchange scatters and gathers."""
_HEADS = _TO_HEADS[0]
_TEXTS = ("joint_tensor_query", "joint_tensor_key", "joint_tensor_value")


def patches() -> list[Patch]:
    """Rows that put the exchange, and the attention around it, in place."""
    exchange = _Exchange()
    return [
        Patch(
            "yunchang.comm.all_to_all",
            "all_to_all_4D",
            "xDiT's long-context attention (StepVideo, Sana)",
            exchange.in_place_of,
            ("input", "scatter_idx", "gather_idx", "group", "use_sync"),
        ),
        *(
            Patch(_MODULE, f"{name}.forward", "V goes first, and codecs know the layer", around)
            for name, around in (
                ("xFuserLongContextAttention", exchange.around),
                ("xFuserSanaLinearLongContextAttention", functools.partial(exchange.around, is_flat=True)),
            )
        ),
    ]


class _Exchange:
    """Yunchang's exchange, which a forward of the attention calls for Q, K, V and O. Where the plugin moves these
    around the forward, there is nothing left to move in it."""

    def __init__(self) -> None:
        self._is_done = False

    @contextmanager
    def _done(self) -> Iterator[None]:
        before, self._is_done = self._is_done, True
        try:
            yield
        finally:
            self._is_done = before

    def in_place_of(self, original: Callable) -> Callable:
        """The exchange of one tensor."""

        @functools.wraps(original)
        def all_to_all_4D(  # noqa: N802 (yunchang's name)
            input: torch.Tensor,
            scatter_idx: int = 2,
            gather_idx: int = 1,
            group: dist.ProcessGroup | None = None,
            use_sync: bool = False,
        ) -> torch.Tensor:
            if self._is_done:
                return input
            mesh = active().mesh if _is_ulysses(group) else None
            if {scatter_idx, gather_idx} != {1, 2} or use_sync or not fits((input,), scatter_idx, mesh):
                return original(input, scatter_idx, gather_idx, group, use_sync)
            return reshard([input], scatter_idx, gather_idx, mesh)[0]

        return all_to_all_4D

    def around(self, original: Callable, is_flat: bool = False) -> Callable:
        """The attention of a layer.

        Args:
            original: its forward.
            is_flat: whether that returns (B, S, H * D), rather than (B, S, H, D).
        """

        # Without what torch.compile has noted of it: PyTorch 2.8 would find its way to the original by that.
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
            if torch.compiler.is_compiling() or not _is_ours(module, query, key, value, session):
                return original(module, attn, query, key, value, **options)
            heads, degree, as_given = query.shape[_HEADS], session.mesh.topology.size, value.transpose(1, 2)
            query, key, value = (pad_heads(tensor, degree, _HEADS) for tensor in (query, key, value))
            options |= {
                name: pad_heads(text, degree, _HEADS)
                for name, text in options.items()
                if name in _TEXTS and text is not None
            }
            if (joint := options.get("joint_tensor_query")) is not None:
                query = torch.cat([query, joint] if options["joint_strategy"] == "rear" else [joint, query], 1)
            query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))

            def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: HeadGroup) -> torch.Tensor:
                at_heads = [tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)]
                if joint is not None:  # K and V are still to be joined
                    options["joint_tensor_query"] = at_heads[0][:, :0]
                with self._done():
                    attended = original(module, attn, *at_heads, **options)
                if is_flat:
                    attended = attended.unflatten(-1, (q.shape[1], -1))
                return attended.transpose(1, 2)

            under_way = early_value(as_given, session)
            attended = scheduled_attention(query, key, value, lambda *_: attend, under_way, session).transpose(1, 2)
            attended = attended[:, :, :heads]
            return attended.flatten(2) if is_flat else attended.contiguous()

        is_traced = not getattr(original, "_torchdynamo_disable", False)
        return forward if is_traced else torch.compiler.disable(forward)


def _is_ulysses(group: dist.ProcessGroup | None) -> bool:
    from yunchang.globals import PROCESS_GROUP

    return group is PROCESS_GROUP.ULYSSES_PG


def _is_ours(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, session: Session) -> bool:
    """Whether this call is one that is understood here; by what is the same on every rank."""
    return (
        session.mesh is not None
        and _is_ulysses(module.ulysses_pg)
        and (module.scatter_idx, module.gather_idx) == _TO_HEADS
        and not module.use_pack_qkv
        and query.shape[_HEADS] == key.shape[_HEADS]
        and all(tensor.ndim == 4 and tensor.dtype == query.dtype for tensor in (query, key, value))
    )
