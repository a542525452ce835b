"""Functions of PyTorch that reach into tensors in C++, where no dispatch mode sees it."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


def replacements(device_type: str) -> list[tuple[Any, str, Callable]]:
    """Return owner, name and replacement of each function, for a type of device whose tensors are fake."""
    return [
        (torch.Tensor, "record_stream", lambda *_: None),
        (torch.Tensor, "data_ptr", _address_of(torch.Tensor.data_ptr)),
        (torch, "tensor", _copied_to_device(device_type, torch.tensor)),
        (torch.Tensor, "new_tensor", _new_tensor),
    ]


def _address_of(original: Callable[[torch.Tensor], int]) -> Callable[[torch.Tensor], int]:
    """Return torch.Tensor.data_ptr with addresses for fake tensors, which tell views of the same memory."""

    def address(tensor: torch.Tensor) -> int:
        if not isinstance(tensor, FakeTensor):
            return original(tensor)
        return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()

    return address


def _new_tensor(like: torch.Tensor, values: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    """Return what torch.Tensor.new_tensor does, by torch.tensor."""
    return torch.tensor(values, dtype=dtype or like.dtype, device=device or like.device)


def _copied_to_device(device_type: str, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return torch.tensor for the device: the original copies in C++, where no dispatch mode sees it."""

    @functools.wraps(original)
    def tensor(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        target = torch.device(device or torch.get_default_device())
        if target.type != device_type:
            return original(*args, device=device, **kwargs)
        return original(*args, device="cpu", **kwargs).to(target)

    return tensor
