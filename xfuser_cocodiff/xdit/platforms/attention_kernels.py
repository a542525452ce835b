"""Attention kernel that returns the log-sum-exp (LSE) on XPUs, for ring attention, which merges blocks by it.

It serves xDiT's backend SDPA_FLASH. Newer versions of PyTorch have flash attention for XPUs and need no such kernel.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from xfuser_cocodiff.xdit.patching import host
from xfuser_cocodiff.xdit.patching.patch import Patch

MAX_SCORES = 2**26
"""Most attention scores, in float32, in memory at once."""


def patches(kernel: Callable | None) -> list[Patch]:
    """Return the patches for a device on which xDiT has no kernel of SDPA_FLASH.

    Args:
        kernel: the kernel; None where xDiT's own works.
    """
    add = functools.partial(Patch, feature="attention with a log-sum-exp")
    usp, state = "xfuser.model_executor.layers.usp", "xfuser.core.distributed.runtime_state"
    why = "it selects cuDNN with a CUDA build of PyTorch, and SDPA without LSE in a ring"
    select = add(state, "RuntimeState._select_attention_backend", why, _select_with_lse, ("self", "engine_config"))
    if kernel is None:
        return [select]
    with_kernel = functools.partial(_with_kernel, kernel)
    return [select, add(usp, "_get_attention_function", "SDPA_FLASH has no kernel", with_kernel, ("backend",))]


def xpu_kernel() -> Callable | None:
    """Return the kernel of SDPA_FLASH on XPUs; None if PyTorch has flash attention for them."""
    has_flash = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_dot_product_flash_attention", "XPU")
    return None if has_flash else sdpa_with_lse


def sdpa_with_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    attention_kwargs: dict | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention on any device, with the signature of xDiT's backends; scores are computed twice.

    Args:
        query: shape (B, H, S, D).
        key: shape (B, H, T, D).
        value: as `key`.
        dropout_p: probability of dropping a weight.
        is_causal: whether a token attends only to itself and earlier ones.
        attention_kwargs: may hold an "attn_mask" that broadcasts to (B, H, S, T).

    Returns:
        O, shape (B, H, S, D), and its LSE, shape (B, H, S), float32.

    Raises:
        ValueError: attention is causal, which no diffusion transformer uses.
    """
    if is_causal:
        raise ValueError("causal ring attention is not supported on this device; use --ring_degree 1")
    mask = added_mask(attention_kwargs, query.dtype)
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout_p)
    return output, _log_sum_exp(query, key, mask)


def added_mask(attention_kwargs: dict | None, dtype: torch.dtype) -> torch.Tensor | None:
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


def _with_kernel(kernel: Callable, original: Callable) -> Callable:
    @functools.wraps(original)
    def _get_attention_function(backend: Any = None) -> Callable:
        is_served = host.backend_name(backend) == "SDPA_FLASH"
        return host.usp().concat_joint_tensors_decorator(kernel) if is_served else original(backend=backend)

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
