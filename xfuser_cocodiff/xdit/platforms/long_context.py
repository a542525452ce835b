"""xDiT's long-context attention (StepVideo, Sana) on devices without CUDA and flash-attn."""

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from xfuser_cocodiff.xdit.patching.patch import Patch

_PACKAGE = "xfuser.core.long_ctx_attention"
_RING = f"{_PACKAGE}.ring.ring_flash_attn"
_NATIVE_SUPPORT = (_RING, "runnable_attn_type")
"""Symbol of an xDiT whose long-context attention runs there without patches; the series in patches/ adds it."""


def patches() -> list[Patch]:
    """Return the patches with which it can be imported and run."""
    modules = {
        f"{_PACKAGE}.hybrid.attn_layer": "xFuserLongContextAttention",
        _RING: "xdit_ring_flash_attn_func",
        f"{_PACKAGE}.ring.ring_npu_flash_attn": "xdit_ring_npu_flash_attn_func",
    }
    add = functools.partial(Patch, unless_present=_NATIVE_SUPPORT)
    return [
        *(
            add(module, symbol, "imports yunchang with CUDA only", None, import_context=_cuda_available)
            for module, symbol in modules.items()
        ),
        add(_RING, "select_flash_attn_impl", "flash-attn needs CUDA", _with_torch_attention),
        add(
            "xfuser.model_executor.layers.attention_processor",
            "AttnType",
            "Sana asks yunchang for a type that has been renamed",
            _with_torch_type,
        ),
    ]


@contextmanager
def _cuda_available() -> Iterator[None]:
    """Let torch.cuda.is_available() return True, for modules that import yunchang only then."""
    importlib.import_module("yunchang.kernels")  # before the patch, which it must not see
    from yunchang.ring import utils

    if not hasattr(utils, "update_npu_out"):  # yunchang 0.6.4 has none, and only NPUs would call it
        utils.update_npu_out = None
    is_available, torch.cuda.is_available = torch.cuda.is_available, lambda: True
    try:
        yield
    finally:
        torch.cuda.is_available = is_available


def _with_torch_attention(select: Callable) -> Callable:
    """Return yunchang's choice of attention, with PyTorch's in the place of flash-attn, the default."""

    @functools.wraps(select)
    def select_flash_attn_impl(impl_type: Any, *args: Any, **kwargs: Any) -> Callable:
        from yunchang.kernels import AttnType

        if impl_type not in (AttnType.FA, AttnType.TORCH_MATH):
            return select(impl_type, *args, **kwargs)
        return _with_log_sum_exp(select(AttnType.TORCH_MATH, *args, **kwargs))

    return select_flash_attn_impl


def _with_log_sum_exp(attend: Callable) -> Callable:
    """Return PyTorch's attention with its log-sum-exp, in a ring. Yunchang returns zeros instead, by which a ring would
    merge its blocks with equal weights."""

    def attended(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from xfuser.core.distributed import get_ring_parallel_world_size

        output, log_sum_exp = attend(query, key, value, **options)
        if get_ring_parallel_world_size() > 1:
            log_sum_exp = _log_sum_exp(query, key, options["softmax_scale"], options["causal"])
        return output, log_sum_exp

    return attended


def _log_sum_exp(query: torch.Tensor, key: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    """Return the log-sum-exp of attention scores, shape (B, H, S), float32; Q and K have shape (B, S, H, D)."""
    scores = scale * (query.transpose(1, 2).float() @ key.permute(0, 2, 3, 1).float())
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores.logsumexp(dim=-1)


def _with_torch_type(types: Any) -> Any:
    """Add the old name of PyTorch's attention to yunchang's types."""
    if not hasattr(types, "TORCH"):
        types.TORCH = types.TORCH_MATH
    return types
