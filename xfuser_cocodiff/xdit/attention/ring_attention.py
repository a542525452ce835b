"""Attention in a ring on CPUs and XPUs: one that returns its log-sum-exp, which xDiT has for other devices only.

A ring merges what it attends block by block, by the log-sum-exp of each block. PyTorch's flash attention for CPUs
returns it, and gives the bits of `scaled_dot_product_attention`. For XPUs newer PyTorches have flash attention; where
there is none, the log-sum-exp is computed beside `scaled_dot_product_attention`. Either stands behind xDiT's backend
SDPA_FLASH here.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.platforms.platform import compute_device

DEVICES = ("cpu", "xpu")
SCORES = 2**26
"""Of queries to keys, in float32, that are held at once."""


def patches() -> list[Patch]:
    """Rows for these devices."""
    return [
        Patch(
            "xfuser.model_executor.layers.usp",
            "_get_attention_function",
            "SDPA_FLASH has no kernel for a CPU, and none for an XPU in every PyTorch",
            _with_flash,
            ("backend",),
        ),
        Patch(
            "xfuser.core.distributed.runtime_state",
            "RuntimeState._select_attention_backend",
            "takes cuDNN's where PyTorch is a CUDA build, and SDPA in a ring, which needs a log-sum-exp",
            _returning_lse_in_a_ring,
            ("self", "engine_config"),
        ),
    ]


def attention_for(device_type: str) -> Callable | None:
    """What stands behind SDPA_FLASH on a device; None where xDiT's own has a kernel."""
    if device_type == "cpu":
        return flash
    flash_here = "aten::_scaled_dot_product_flash_attention", device_type.upper()
    return None if torch._C._dispatch_has_kernel_for_dispatch_key(*flash_here) else fused


def flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    attention_kwargs: dict | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention on a CPU, as xDiT's backends have it.

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
    mask = _added_mask(attention_kwargs, query.dtype)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=mask
    )


def fused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    attention_kwargs: dict | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`flash` on any device: scores are computed twice.

    Raises:
        ValueError: attention is causal, which none is in a transformer that denoises.
    """
    if is_causal:
        raise ValueError("a ring of causal attention is not supported on this device")
    mask = _added_mask(attention_kwargs, query.dtype)
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout_p)
    return output, _log_sum_exp(query, key, mask)


def _added_mask(attention_kwargs: dict | None, dtype: torch.dtype) -> torch.Tensor | None:
    """The mask, if there is one, as it is added to scores: kernels do not know masks of what is seen."""
    mask = (attention_kwargs or {}).get("attn_mask")
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


def _log_sum_exp(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """In float32, some queries at a time."""
    shape = (*query.shape[:3], key.shape[-2])
    keys = key.float().transpose(-1, -2) * query.shape[-1] ** -0.5
    masks = None if mask is None else mask.expand(shape)
    found = query.new_empty(shape[:3], dtype=torch.float32)
    count = max(1, SCORES // (shape[0] * shape[1] * shape[3]))
    for start in range(0, shape[2], count):
        part = slice(start, start + count)
        scores = query[:, :, part].float() @ keys
        if masks is not None:
            scores += masks[:, :, part]
        found[:, :, part] = scores.logsumexp(-1)
    return found


def _with_flash(original: Callable) -> Callable:
    @functools.wraps(original)
    def _get_attention_function(backend: Any = None) -> Callable:
        from xfuser.core.distributed import get_runtime_state
        from xfuser.core.distributed.attention_backend import AttentionBackendType
        from xfuser.model_executor.layers import usp

        wanted = backend or get_runtime_state().attention_backend
        attention = attention_for(compute_device().type) if wanted is AttentionBackendType.SDPA_FLASH else None
        return usp.concat_joint_tensors_decorator(attention) if attention else original(backend=backend)

    return _get_attention_function


def _returning_lse_in_a_ring(original: Callable) -> Callable:
    @functools.wraps(original)
    def _select_attention_backend(self: Any, engine_config: Any = None) -> Any:
        from xfuser.core.distributed.attention_backend import AttentionBackendType

        if engine_config is not None and engine_config.runtime_config.attention_backend:
            return original(self, engine_config)
        in_a_ring = self.parallel_config.ring_degree > 1
        return AttentionBackendType.SDPA_FLASH if in_a_ring else AttentionBackendType.SDPA

    return _select_attention_backend
