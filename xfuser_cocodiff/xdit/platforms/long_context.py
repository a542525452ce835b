"""xDiT's long-context attention (StepVideo, Sana) where there is neither CUDA nor flash-attn."""

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from xfuser_cocodiff.xdit.patching.patch import Patch

_PACKAGE = "xfuser.core.long_ctx_attention"
_RING = f"{_PACKAGE}.ring.ring_flash_attn"
_XDITS_OWN = (_RING, "runnable_attn_type")
"""What an xDiT has whose long-context attention runs there of itself: the series in patches/ brings it."""


def patches() -> list[Patch]:
    """Rows that make it import and run."""
    modules = {
        f"{_PACKAGE}.hybrid.attn_layer": "xFuserLongContextAttention",
        _RING: "xdit_ring_flash_attn_func",
        f"{_PACKAGE}.ring.ring_npu_flash_attn": "xdit_ring_npu_flash_attn_func",
    }
    add = functools.partial(Patch, unless_present=_XDITS_OWN)
    return [
        *(
            add(module, symbol, "imports yunchang with CUDA only", None, import_context=_as_with_cuda)
            for module, symbol in modules.items()
        ),
        add(_RING, "select_flash_attn_impl", "flash-attn needs CUDA", _by_pytorch),
        add(
            "xfuser.model_executor.layers.attention_processor",
            "AttnType",
            "Sana asks yunchang for a type that it has no more",
            _with_pytorchs,
        ),
    ]


@contextmanager
def _as_with_cuda() -> Iterator[None]:
    """Context in which there seems to be CUDA, for what only imports yunchang then."""
    importlib.import_module("yunchang.kernels")  # which is not to be told so
    from yunchang.ring import utils

    if not hasattr(utils, "update_npu_out"):  # yunchang 0.6.4 has none, and only NPUs would call it
        utils.update_npu_out = None
    is_available, torch.cuda.is_available = torch.cuda.is_available, lambda: True
    try:
        yield
    finally:
        torch.cuda.is_available = is_available


def _by_pytorch(select: Callable) -> Callable:
    """Yunchang's choice of attention, with PyTorch's in the place of flash-attn, which is what is asked for unless
    somebody says otherwise."""

    @functools.wraps(select)
    def select_flash_attn_impl(impl_type: Any, *args: Any, **kwargs: Any) -> Callable:
        from yunchang.kernels import AttnType

        if impl_type not in (AttnType.FA, AttnType.TORCH_MATH):
            return select(impl_type, *args, **kwargs)
        return _for_a_ring(select(AttnType.TORCH_MATH, *args, **kwargs))

    return select_flash_attn_impl


def _for_a_ring(attend: Callable) -> Callable:
    """PyTorch's attention with its log-sum-exp: yunchang gives zeros, by which a ring would merge its blocks as if they
    weighed the same."""

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
    """Of the scores of tensors (B, S, H, D): shape (B, H, S), float32."""
    scores = scale * (query.transpose(1, 2).float() @ key.permute(0, 2, 3, 1).float())
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores.logsumexp(dim=-1)


def _with_pytorchs(types: Any) -> Any:
    """Yunchang's types of attention, with the name that PyTorch's once had."""
    if not hasattr(types, "TORCH"):
        types.TORCH = types.TORCH_MATH
    return types
