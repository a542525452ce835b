"""Answers indexing by a Boolean mask on tensors without values: the number of selected elements is a value."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class FullMask(TorchFunctionMode):
    """Context in which every one-dimensional Boolean mask that indexes a tensor selects all elements.

    As on an accelerator, the host waits for the device, where the mask is computed.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replace the masks of an index by all positions."""
        if func is torch.Tensor.__getitem__ and isinstance(args[1], tuple):
            args = (args[0], tuple(_positions(index) for index in args[1]))
        return func(*args, **(kwargs or {}))


def _positions(index: Any) -> Any:
    if not isinstance(index, torch.Tensor) or index.dtype != torch.bool:
        return index
    if index.device.type != "cpu":
        torch.accelerator.current_stream(index.device).synchronize()
    return torch.arange(len(index), device=index.device)
