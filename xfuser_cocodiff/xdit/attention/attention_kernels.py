"""Attention kernels that return the log-sum-exp (LSE) on CPUs and XPUs, for ring attention.

Ring attention merges blocks by their LSE, which xDiT's kernels return on other devices only. PyTorch's flash attention
for CPUs returns it, and is bit-identical to `scaled_dot_product_attention`. Newer versions of PyTorch have flash
attention for XPUs; otherwise the LSE is computed beside `scaled_dot_product_attention`. The kernels serve xDiT's
backend SDPA_FLASH.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from xfuser_cocodiff.xdit.patching import host
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.platforms.platform import compute_device

DEVICES = ("cpu", "xpu")
MAX_SCORES = 2**26
"""Most attention scores, in float32, in memory at once."""


def patches() -> list[Patch]:
    """Return the patches for these devices."""
    return [
        Patch(
            "xfuser.model_executor.layers.usp",
            "_get_attention_function",
            "SDPA_FLASH has no kernel for CPUs, nor for XPUs in every PyTorch",
            _with_kernels,
            ("backend",),
        ),
        Patch(
            "xfuser.core.distributed.runtime_state",
            "RuntimeState._select_attention_backend",
            "it selects cuDNN with a CUDA build of PyTorch, and SDPA without LSE in a ring",
            _select_with_lse,
            ("self", "engine_config"),
        ),
    ]


def kernel_for(device_type: str) -> Callable | None:
    """Return the kernel of SDPA_FLASH on a device; None if xDiT's own supports the device."""
    if device_type not in DEVICES:
        return None
    if device_type == "cpu":
        return flash_attention
    dispatch_key = "aten::_scaled_dot_product_flash_attention", device_type.upper()
    return None if torch._C._dispatch_has_kernel_for_dispatch_key(*dispatch_key) else sdpa_with_lse


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    attention_kwargs: dict | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute flash attention on a CPU, with the signature of xDiT's backends.

    Args:
        query: shape (B, H, S, D).
        key: shape (B, H, T, D).
        value: as `key`.
        dropout_p: probability of dropping a weight.
        is_causal: whether a token attends only to itself and earlier ones.
        attention_kwargs: may hold an "attn_mask" that broadcasts to (B, H, S, T).

    Returns:
        O, shape (B, H, S, D), and its LSE, shape (B, H, S), float32.
    """
    mask = _added_mask(attention_kwargs, query.dtype)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=mask
    )


def sdpa_with_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    attention_kwargs: dict | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention on any device, as :func:`flash_attention`; scores are computed twice.

    Raises:
        ValueError: attention is causal, which no diffusion transformer uses.
    """
    if is_causal:
        raise ValueError("causal ring attention is not supported on this device; use --ring_degree 1")
    mask = _added_mask(attention_kwargs, query.dtype)
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout_p)
    return output, _log_sum_exp(query, key, mask)


def _added_mask(attention_kwargs: dict | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the mask as values to add to scores; None without one. Kernels do not support boolean masks."""
    mask = (attention_kwargs or {}).get("attn_mask")
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


def _log_sum_exp(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the LSE of all scores in float32, computed for some queries at a time."""
    shape = (*query.shape[:3], key.shape[-2])
    keys = key.float().transpose(-1, -2) * query.shape[-1] ** -0.5
    masks = None if mask is None else mask.expand(shape)
    lse = query.new_empty(shape[:3], dtype=torch.float32)
    count = max(1, MAX_SCORES // (shape[0] * shape[1] * shape[3]))
    for start in range(0, shape[2], count):
        part = slice(start, start + count)
        scores = query[:, :, part].float() @ keys
        if masks is not None:
            scores += masks[:, :, part]
        lse[:, :, part] = scores.logsumexp(-1)
    return lse


def _with_kernels(original: Callable) -> Callable:
    @functools.wraps(original)
    def _get_attention_function(backend: Any = None) -> Callable:
        kernel = kernel_for(compute_device().type) if host.backend_name(backend) == "SDPA_FLASH" else None
        return host.usp().concat_joint_tensors_decorator(kernel) if kernel else original(backend=backend)

    return _get_attention_function


def _select_with_lse(original: Callable) -> Callable:
    @functools.wraps(original)
    def _select_attention_backend(self: Any, engine_config: Any = None) -> Any:
        if engine_config is not None and engine_config.runtime_config.attention_backend:
            return original(self, engine_config)
        has_ring = self.parallel_config.ring_degree > 1
        backends = type(self.attention_backend)  # in a module that newer versions of xDiT move
        return backends.SDPA_FLASH if has_ring else backends.SDPA

    return _select_attention_backend
