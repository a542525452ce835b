"""A group of heads: what travels and attends as one."""

from typing import NamedTuple

import torch


class HeadGroup(NamedTuple):
    """One of several equal parts of the heads that each rank holds between two exchanges."""

    index: int = 0  # type: ignore[assignment]  # a tuple's own index and count are of no use here
    count: int = 1  # type: ignore[assignment]

    def of(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The group's share of a dim, as a view."""
        size = tensor.shape[dim] // self.count
        return tensor.narrow(dim, self.index * size, size)


ALL_HEADS = HeadGroup()
