"""Operations that accelerators run as one kernel, and that PyTorch would decompose for a device written in Python."""

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch.nn import functional


def replacements(device_type: str) -> list[tuple[ModuleType, str, Callable]]:
    """Return module, name and replacement of each function that runs as one kernel on a type of device."""
    return [
        (functional, name, _on_device(device_type, getattr(functional, name), fused))
        for name, fused in (("scaled_dot_product_attention", _attention), ("rms_norm", _rms_norm))
    ]


def _on_device(device_type: str, original: Callable, fused: Callable) -> Callable:
    """Return a function that runs fused on a type of device, and unchanged elsewhere."""

    @functools.wraps(original)
    def run(*args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        given = args[0] if args else next(iter(kwargs.values()))
        return (fused if given.device.type == device_type else original)(*args, **kwargs)

    return run


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, scale: float | None = None, **__: Any
) -> torch.Tensor:
    """Flash attention; a mask costs nothing here."""
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)[0]


def _rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """A LayerNorm without bias, which reads and writes the same."""
    return torch.native_layer_norm(input, list(normalized_shape), weight, None, eps or 0.0)[0]
