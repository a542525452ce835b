"""The head dim and dtype of a model's Q, K, V and O, for which kernels are compiled."""

from typing import NamedTuple

import torch


class HeadFormat(NamedTuple):
    """What kernels are compiled for, of the values of a model."""

    head_dim: int = 128
    """Head dim; that of most models if it is unknown."""
    dtype: torch.dtype = torch.bfloat16
    """Type of Q, K, V and O."""


USUAL_VALUES = HeadFormat()
