"""A head group: heads that are sent and attended to together."""

from typing import NamedTuple

import torch


class HeadGroup(NamedTuple):
    """One of several equal parts of the heads that a rank attends to."""

    index: int = 0  # type: ignore[assignment]  # hides tuple.index and tuple.count, which are not needed
    count: int = 1  # type: ignore[assignment]

    def of(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the part of a dim that belongs to this group, as a view."""
        size = tensor.shape[dim] // self.count
        return tensor.narrow(dim, self.index * size, size)


ALL_HEADS = HeadGroup()
