"""Gives modules that were constructed on the meta device tensors on another device, without values."""

from collections.abc import Collection

import torch
from torch import nn


def materialize(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Replace all tensors of a model by uninitialized ones on a device.

    Like `from_pretrained`, it gives weights and saved buffers a dtype, but not buffers that are computed, and not the
    modules that the model's class keeps in float32. `Module.to_empty` is no alternative: it cannot swap fake tensors.

    Args:
        model: model whose tensors are on the meta device.
        device: device of the new tensors.
        dtype: dtype of its floating-point weights.
    """
    kept = getattr(model, "_keep_in_fp32_modules", None) or ()
    for path, module in model.named_modules():
        saved = module._parameters.keys() | module._buffers.keys() - module._non_persistent_buffers_set
        for tensors in (module._parameters, module._buffers, vars(module)):
            for name, tensor in tensors.items():
                if not isinstance(tensor, torch.Tensor):
                    continue
                is_cast = name in saved and tensor.is_floating_point() and not _is_kept(f"{path}.{name}", kept)
                empty = torch.empty(tensor.shape, dtype=dtype if is_cast else tensor.dtype, device=device)
                is_weight = tensors is module._parameters
                tensors[name] = nn.Parameter(empty, requires_grad=False) if is_weight else empty


def _is_kept(path: str, modules: Collection[str]) -> bool:
    return not set(path.split(".")).isdisjoint(modules)
