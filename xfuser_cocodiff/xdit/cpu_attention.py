"""Ring attention on a CPU: an attention that returns its log-sum-exp, which xDiT has for accelerators only.

A ring merges what it attends block by block, by the log-sum-exp of each block. PyTorch's flash attention for CPUs
returns it, and gives the bits of `scaled_dot_product_attention`; it stands behind xDiT's backend SDPA_FLASH here.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from xfuser_cocodiff.xdit.patch import Patch


def patches() -> list[Patch]:
    """Rows for a machine without an accelerator."""
    return [
        Patch(
            "xfuser.model_executor.layers.usp",
            "_get_attention_function",
            "SDPA_FLASH has no kernel for a CPU",
            _with_flash,
            ("backend",),
        ),
        Patch(
            "xfuser.core.distributed.runtime_state",
            "RuntimeState._select_attention_backend",
            "takes cuDNN's where PyTorch is a CUDA build, and SDPA in a ring, which needs a log-sum-exp",
            _of_a_cpu,
            ("self", "engine_config"),
        ),
    ]


def flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    attention_kwargs: dict | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention as xDiT's backends have it.

    Args:
        query: shape (B, H, S, D).
        key: shape (B, H, T, D).
        value: as `key`.
        dropout_p: probability with which weights are dropped.
        is_causal: whether a token sees only itself and those before it.
        attention_kwargs: may hold an "attn_mask" that broadcasts to (B, H, S, T).

    Returns:
        O, shape (B, H, S, D), and its log-sum-exp, shape (B, H, S), float32.
    """
    mask = (attention_kwargs or {}).get("attn_mask")
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=mask
    )


def _with_flash(original: Callable) -> Callable:
    @functools.wraps(original)
    def _get_attention_function(backend: Any = None) -> Callable:
        from xfuser.core.distributed import get_runtime_state
        from xfuser.core.distributed.attention_backend import AttentionBackendType
        from xfuser.model_executor.layers import usp

        wanted = backend or get_runtime_state().attention_backend
        if wanted is AttentionBackendType.SDPA_FLASH:
            return usp.concat_joint_tensors_decorator(flash)
        return original(backend=backend)

    return _get_attention_function


def _of_a_cpu(original: Callable) -> Callable:
    @functools.wraps(original)
    def _select_attention_backend(self: Any, engine_config: Any = None) -> Any:
        from xfuser.core.distributed.attention_backend import AttentionBackendType

        if engine_config is not None and engine_config.runtime_config.attention_backend:
            return original(self, engine_config)
        in_a_ring = self.parallel_config.ring_degree > 1
        return AttentionBackendType.SDPA_FLASH if in_a_ring else AttentionBackendType.SDPA

    return _select_attention_backend
