"""Provides the inputs of one call of each transformer, as xDiT's pipelines pass them, without values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from xfuser_cocodiff.lab.launching import transformer_wrappers
from xfuser_cocodiff.lab.launching.bare_runtime import PIXELS_PER_LATENT
from xfuser_cocodiff.lab.simulation.workloads import PIXELS_PER_TOKEN


@dataclass(frozen=True)
class Request:
    """Size of one call, and the device and dtype of its inputs."""

    height: int
    """Pixels per column."""
    width: int
    """Pixels per row."""
    frames: int
    """Latent frames; 1 for an image."""
    rows: int
    """Batch rows."""
    text_tokens: int
    """Text tokens."""
    device: torch.device
    """Device of the inputs."""
    dtype: torch.dtype
    """Dtype of latents and embeddings."""

    @property
    def latents(self) -> tuple[int, int]:
        """Height and width of the latents."""
        return self.height // PIXELS_PER_LATENT, self.width // PIXELS_PER_LATENT

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tokens of an image."""
        return self.height // PIXELS_PER_TOKEN, self.width // PIXELS_PER_TOKEN

    @property
    def tokens(self) -> int:
        """Number of tokens of an image."""
        rows, columns = self.grid
        return rows * columns

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return an uninitialized tensor for all batch rows, shape (B, *shape)."""
        return torch.empty((self.rows, *shape), dtype=dtype or self.dtype, device=self.device)


Sizes = Mapping[str, Any]
"""Arguments of a transformer's class."""
Inputs = dict[str, Any]
"""Arguments of a transformer's forward."""


def _flux1(request: Request, sizes: Sizes) -> Inputs:
    transformer_wrappers.set_text_tokens(request.text_tokens)
    ids = {"dtype": request.dtype, "device": request.device}
    return {
        "hidden_states": request.empty(request.tokens, sizes["in_channels"]),
        "encoder_hidden_states": request.empty(request.text_tokens, sizes["joint_attention_dim"]),
        "pooled_projections": request.empty(sizes["pooled_projection_dim"]),
        "timestep": request.empty(),
        "guidance": request.empty(dtype=torch.float32),
        "img_ids": torch.empty(request.tokens, 3, **ids),
        "txt_ids": torch.empty(request.text_tokens, 3, **ids),
    }


def _flux2(request: Request, sizes: Sizes) -> Inputs:
    transformer_wrappers.set_text_tokens(request.text_tokens)
    return {
        "hidden_states": request.empty(request.tokens, sizes["in_channels"]),
        "encoder_hidden_states": request.empty(request.text_tokens, sizes["joint_attention_dim"]),
        "timestep": request.empty(),
        "guidance": request.empty(dtype=torch.float32),
        "img_ids": request.empty(request.tokens, 4, dtype=torch.int64),
        "txt_ids": request.empty(request.text_tokens, 4, dtype=torch.int64),
    }


def _sd35(request: Request, sizes: Sizes) -> Inputs:
    """Return inputs with this rank's rows of latents and its text, since the pipeline shards them."""
    latents, text = transformer_wrappers.shard_inputs(
        request.empty(sizes["in_channels"], *request.latents),
        request.empty(request.text_tokens, sizes["joint_attention_dim"]),
        request.height,
        request.width,
    )
    return {
        "hidden_states": latents,
        "encoder_hidden_states": text,
        "pooled_projections": request.empty(sizes["pooled_projection_dim"]),
        "timestep": request.empty(dtype=torch.float32),
    }


def _qwen_image(request: Request, sizes: Sizes) -> Inputs:
    """Return inputs without a mask, as the pipeline does for prompts of the same length."""
    transformer_wrappers.set_text_tokens(request.text_tokens)
    return {
        "hidden_states": request.empty(request.tokens, sizes["in_channels"]),
        "encoder_hidden_states": request.empty(request.text_tokens, sizes["joint_attention_dim"]),
        "timestep": request.empty(),
        "img_shapes": [[(1, *request.grid)]] * request.rows,
    }


def _hunyuan_video(request: Request, sizes: Sizes) -> Inputs:
    """Return inputs with text without padding, which the wrapper would drop."""
    transformer_wrappers.set_text_tokens(request.text_tokens)
    return {
        "hidden_states": request.empty(sizes["in_channels"], request.frames, *request.latents),
        "timestep": request.empty(),
        "encoder_hidden_states": request.empty(request.text_tokens, sizes["text_embed_dim"]),
        "encoder_attention_mask": request.empty(request.text_tokens, dtype=torch.int64),
        "pooled_projections": request.empty(sizes["pooled_projection_dim"]),
        "guidance": request.empty(),
    }


def _wan(request: Request, sizes: Sizes) -> Inputs:
    return {
        "hidden_states": request.empty(sizes["in_channels"], request.frames, *request.latents),
        "timestep": request.empty(dtype=torch.float32),
        "encoder_hidden_states": request.empty(request.text_tokens, sizes["text_dim"]),
    }


INPUTS: dict[str, Callable[[Request, Sizes], Inputs]] = {
    "flux.1-dev": _flux1,
    "flux.2-dev": _flux2,
    "sd3.5-large": _sd35,
    "qwen-image": _qwen_image,
    "hunyuanvideo": _hunyuan_video,
    "wan2.1-14b": _wan,
}
"""Functions that return the inputs of each model from a request and the arguments of its class."""
