"""How two tensors of one shape lie in memory, seen as rows that follow each other in both."""

import math
from collections.abc import Sequence
from typing import NamedTuple

ROW_DIMS = 5
"""Dims of rows that a kernel can tell apart."""


class Layout(NamedTuple):
    """Rows of `columns` values, by ROW_DIMS dims."""

    columns: int
    sizes: tuple[int, ...]
    target_strides: tuple[int, ...]
    source_strides: tuple[int, ...]

    @property
    def rows(self) -> int:
        """How many."""
        return math.prod(self.sizes)


def merged(shape: Sequence[int], target_strides: Sequence[int], source_strides: Sequence[int]) -> Layout | None:
    """The layout with the longest rows; None where rows are single values, or have more dims than can be told apart."""
    dims: list[tuple[int, int, int]] = []
    for size, target, source in zip(shape, target_strides, source_strides, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1:] == (target * size, source * size):
            dims[-1] = (dims[-1][0] * size, target, source)
        else:
            dims.append((size, target, source))
    if not dims or dims[-1][1:] != (1, 1) or len(dims) > ROW_DIMS + 1:
        return None
    columns = dims.pop()[0]
    dims = [(1, 0, 0)] * (ROW_DIMS - len(dims)) + dims
    return Layout(columns, *zip(*dims, strict=True))
