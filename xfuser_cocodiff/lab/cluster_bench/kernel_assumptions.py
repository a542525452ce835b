"""What recorded steps assume of attention kernels, since tensors without values cannot show it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS, HeadGroup
from xfuser_cocodiff.xdit.attention import eager_attention
from xfuser_cocodiff.xdit.attention.head_group_choice import HeadGroupCheck


@contextmanager
def independent_heads_and_queries() -> Iterator[None]:
    """Return a context in which attention by head groups, and of some queries to gathered K and V, has stock's bits.

    That is so with kernels that compute each head and each block of queries on its own, as those of SDPA on CPUs.
    """
    with (
        mock.patch.object(eager_attention, "HeadGroupCheck", _AssumedCheck),
        mock.patch.object(eager_attention, "compare_gathered", _assume_equal),
    ):
        yield


class _AssumedCheck(HeadGroupCheck):
    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_group: HeadGroup
    ) -> torch.Tensor:
        return self._attend(query, key, value, ALL_HEADS)


def _assume_equal(*arguments: Any) -> dict[int, bool]:
    """Return that attention is bit-identical with all numbers of head groups, the last argument."""
    return dict.fromkeys(arguments[-1], True)
