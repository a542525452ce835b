"""Provides the inputs of one call of each transformer, as xDiT's pipelines pass them, without values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.bare_runtime import PIXELS_PER_LATENT
from benchmarks.full_size import transformer_wrappers
from xfuser_cocodiff.tools.simulation.workloads import PIXELS_PER_TOKEN, Workload

Inputs = dict[str, Any]
"""Arguments of a transformer's forward."""


@dataclass(frozen=True)
class Request:
    """Size of one call, and the device and dtype of its inputs."""

    workload: Workload
    resolution: int
    """Pixels per side of a square image, or rows of a video of 16:9."""
    batch: int
    """Number of images or videos."""
    device: torch.device
    """Device of the inputs."""
    dtype: torch.dtype
    """Dtype of latents and embeddings."""

    def _grid(self, pixels: int) -> tuple[int, int]:
        """Return rows and columns of squares of so many pixels."""
        width, height = self.workload.size(self.resolution)
        return height // pixels, width // pixels

    @property
    def latents(self) -> tuple[int, int]:
        """Height and width of the latents."""
        return self._grid(PIXELS_PER_LATENT)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tokens of an image."""
        return self._grid(PIXELS_PER_TOKEN)

    @property
    def text_tokens(self) -> int:
        """Number of text tokens, in the sequence or beside it."""
        return self.workload.text_tokens + self.workload.cross_text_tokens

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return an uninitialized tensor for all batch rows, shape (B, *shape)."""
        rows = self.batch * self.workload.rows_per_image
        return torch.empty((rows, *shape), dtype=dtype or self.dtype, device=self.device)

    def streams(self, channels: int, text_width: int) -> Inputs:
        """Return image and text tokens, which the transformer shards, and the time step."""
        transformer_wrappers.set_text_tokens(self.text_tokens)
        rows, columns = self.grid
        return {
            "hidden_states": self.empty(rows * columns, channels),
            "encoder_hidden_states": self.empty(self.text_tokens, text_width),
            "timestep": self.empty(),
        }

    def video(self, channels: int, text_width: int) -> Inputs:
        """Return the latents of a video and its text."""
        return {
            "hidden_states": self.empty(channels, self.workload.latent_frames, *self.latents),
            "encoder_hidden_states": self.empty(self.text_tokens, text_width),
        }


def _flux1(request: Request, config: Any) -> Inputs:
    ids = {"dtype": request.dtype, "device": request.device}
    rows, columns = request.grid
    return {
        **request.streams(config.in_channels, config.joint_attention_dim),
        "pooled_projections": request.empty(config.pooled_projection_dim),
        "guidance": request.empty(dtype=torch.float32),
        "img_ids": torch.empty(rows * columns, 3, **ids),
        "txt_ids": torch.empty(request.text_tokens, 3, **ids),
    }


def _flux2(request: Request, config: Any) -> Inputs:
    rows, columns = request.grid
    return {
        **request.streams(config.in_channels, config.joint_attention_dim),
        "guidance": request.empty(dtype=torch.float32),
        "img_ids": request.empty(rows * columns, 4, dtype=torch.int64),
        "txt_ids": request.empty(request.text_tokens, 4, dtype=torch.int64),
    }


def _sd35(request: Request, config: Any) -> Inputs:
    """Return inputs with this rank's rows of latents and its text, since the pipeline shards them."""
    latents, text = transformer_wrappers.shard_inputs(
        request.empty(config.in_channels, *request.latents),
        request.empty(request.text_tokens, config.joint_attention_dim),
        request.resolution,
        request.resolution,
    )
    return {
        "hidden_states": latents,
        "encoder_hidden_states": text,
        "pooled_projections": request.empty(config.pooled_projection_dim),
        "timestep": request.empty(dtype=torch.float32),
    }


def _qwen_image(request: Request, config: Any) -> Inputs:
    """Return inputs without a mask, as the pipeline does for prompts of the same length."""
    streams = request.streams(config.in_channels, config.joint_attention_dim)
    return {**streams, "img_shapes": [[(1, *request.grid)]] * len(streams["timestep"])}


def _hunyuan_video(request: Request, config: Any) -> Inputs:
    """Return inputs with text without padding, which the wrapper would drop."""
    transformer_wrappers.set_text_tokens(request.text_tokens)
    return {
        **request.video(config.in_channels, config.text_embed_dim),
        "timestep": request.empty(),
        "encoder_attention_mask": request.empty(request.text_tokens, dtype=torch.int64),
        "pooled_projections": request.empty(config.pooled_projection_dim),
        "guidance": request.empty(),
    }


def _wan(request: Request, config: Any) -> Inputs:
    return {**request.video(config.in_channels, config.text_dim), "timestep": request.empty(dtype=torch.float32)}


INPUTS: dict[str, Callable[[Request, Any], Inputs]] = {
    "flux.1-dev": _flux1,
    "flux.2-dev": _flux2,
    "sd3.5-large": _sd35,
    "qwen-image": _qwen_image,
    "hunyuanvideo": _hunyuan_video,
    "wan2.1-14b": _wan,
}
"""Functions that return the inputs of each model from a request and the transformer's config."""
