"""Memory that outlives a call."""

from collections.abc import Sequence

import torch


def lasting(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory that may be written in later calls, whether these are in inference mode or not."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)
