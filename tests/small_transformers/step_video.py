"""StepVideo, of which xDiT has the blocks; what is around them is in a repository of its own."""

from types import SimpleNamespace
from typing import Any

import torch
from diffusers.models.embeddings import Timesteps
from torch import nn
from xfuser.core.distributed import get_sp_group
from xfuser.model_executor.models.customized.step_video_t2v.blocks import StepVideoTransformerBlock

from tests.small_transformers.base import SmallTransformer, band_of

WIDTH, HEAD_DIM = 1024, 128
"""The blocks know how to turn heads of this size only."""


class StepVideoModel(nn.Module):
    """Blocks, and as little around them as there can be."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=WIDTH // HEAD_DIM)
        self.proj_in, self.text_in = nn.Linear(16, WIDTH), nn.Linear(16, WIDTH)
        self.time_proj, self.time_in = Timesteps(32, True, 0), nn.Linear(32, 6 * WIDTH)
        blocks = (StepVideoTransformerBlock(WIDTH, HEAD_DIM, ff_inner_dim=64) for _ in range(2))
        self.transformer_blocks = nn.ModuleList(blocks)
        self.proj_out = nn.Linear(WIDTH, 16)

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        return_dict: bool,
    ) -> tuple[torch.Tensor]:
        """Velocity of a band of tokens (B, N, 16)."""
        hidden_states, text = self.proj_in(hidden_states), self.text_in(encoder_hidden_states)
        time = self.time_in(self.time_proj(timestep).to(text.dtype))
        for block in self.transformer_blocks:
            hidden_states = block(hidden_states, text, timestep=time, rope_positions=[3, 4, 4])
        return (self.proj_out(hidden_states),)


class StepVideo(SmallTransformer):
    """48 video tokens, exchanged in self-attention only, by yunchang."""

    latent_shape = (48, 16)  # N C

    def build(self) -> nn.Module:
        return StepVideoModel()

    def condition(self) -> dict[str, Any]:
        return {"encoder_hidden_states": self.noise(self.text, 16)}

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return get_sp_group().all_gather(super().velocity(band_of(latents), time), dim=-2)
