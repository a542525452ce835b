"""xDiT's long-context attention (StepVideo, Sana) where there is neither CUDA nor flash-attn."""

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from xfuser_cocodiff.xdit.patching.patch import Patch

_PACKAGE = "xfuser.core.long_ctx_attention"


def patches() -> list[Patch]:
    """Rows that make it import and run."""
    ring = f"{_PACKAGE}.ring.ring_flash_attn"
    modules = {
        f"{_PACKAGE}.hybrid.attn_layer": "xFuserLongContextAttention",
        ring: "xdit_ring_flash_attn_func",
        f"{_PACKAGE}.ring.ring_npu_flash_attn": "xdit_ring_npu_flash_attn_func",
    }
    return [
        *(
            Patch(module, symbol, "imports yunchang with CUDA only", None, during=_as_with_cuda)
            for module, symbol in modules.items()
        ),
        Patch(ring, "select_flash_attn_impl", "flash-attn needs CUDA", _by_pytorch),
        Patch(
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

        return select(AttnType.TORCH_MATH if impl_type is AttnType.FA else impl_type, *args, **kwargs)

    return select_flash_attn_impl


def _with_pytorchs(types: Any) -> Any:
    """Yunchang's types of attention, with the name that PyTorch's once had."""
    if not hasattr(types, "TORCH"):
        types.TORCH = types.TORCH_MATH
    return types
