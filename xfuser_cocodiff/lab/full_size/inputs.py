"""Provides the inputs of one call of each transformer, as xDiT's pipelines pass them, without values.

Sizes in shapes: B batch rows, N tokens, C channels, F latent frames, H and W rows and columns of latents.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from xfuser_cocodiff.lab.simulation.workloads import PIXELS_PER_TOKEN
from xfuser_cocodiff.xdit.launching import transformer_wrappers


@dataclass(frozen=True)
class Request:
    """Size of one call, and the device and dtype of its inputs."""

    height: int
    """Pixels per column."""
    width: int
    """Pixels per row."""
    rows: int
    """Batch rows."""
    text_tokens: int
    """Text tokens."""
    device: torch.device
    """Device of the inputs."""
    dtype: torch.dtype
    """Dtype of latents and embeddings."""

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tokens."""
        return self.height // PIXELS_PER_TOKEN, self.width // PIXELS_PER_TOKEN

    @property
    def tokens(self) -> int:
        """Number of image tokens."""
        rows, columns = self.grid
        return rows * columns

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return an uninitialized tensor."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)


Inputs = dict[str, Any]
"""Arguments of a transformer's forward."""


def _flux1(request: Request, sizes: Mapping[str, Any]) -> Inputs:
    transformer_wrappers.set_text_tokens(request.text_tokens)
    return {
        "hidden_states": request.empty(request.rows, request.tokens, sizes["in_channels"]),
        "encoder_hidden_states": request.empty(request.rows, request.text_tokens, sizes["joint_attention_dim"]),
        "pooled_projections": request.empty(request.rows, sizes["pooled_projection_dim"]),
        "timestep": request.empty(request.rows),
        "guidance": request.empty(request.rows, dtype=torch.float32),
        "img_ids": request.empty(request.tokens, 3),
        "txt_ids": request.empty(request.text_tokens, 3),
    }


INPUTS: dict[str, Callable[[Request, Mapping[str, Any]], Inputs]] = {"flux.1-dev": _flux1}
"""Functions that return the inputs of each model from a request and the arguments of its class."""
