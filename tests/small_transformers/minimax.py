"""MiniMax-H3."""

from typing import Any

import torch
from torch import nn
from xfuser.model_executor.models.transformers.transformer_minimax_h3 import xFuserMiniMaxH3Transformer3DWrapper

from tests.small_transformers.base import SmallTransformer

IS_VIDEO, IS_TEXT, IS_AUDIO = range(3)


def wrapped(in_channels: int = 4, audio_in_channels: int = 8) -> xFuserMiniMaxH3Transformer3DWrapper:
    """A transformer for latents of so many channels."""
    return xFuserMiniMaxH3Transformer3DWrapper(
        num_attention_heads=8,
        attention_head_dim=32,
        hidden_size=64,
        num_layers=2,
        num_refiner_layers=1,
        ffn_dim=64,
        in_channels=in_channels,
        audio_in_channels=audio_in_channels,
        text_dim=16,
        freq_dim=32,
        time_embed_hidden_dim=32,
        time_embed_dim=32,
        rope_freq_dim=4,
    )


class MiniMaxH3(SmallTransformer):
    """Text, then 8 audio and 64 video tokens, packed and padded to a multiple of 64; in one row of latents."""

    _video, _audio = (64, 16), (8, 8)  # N C
    latent_shape = (64 * 16 + 8 * 8,)
    is_fused = False

    def build(self) -> nn.Module:
        transformer = wrapped()
        if self.is_fused:
            transformer.fuse_qkv_projections()
        return transformer

    def condition(self) -> dict[str, Any]:
        sizes = self.text, 8, 64
        text, audio, video = torch.arange(sum(sizes)).split(sizes)
        alike = torch.arange(self.text + 8)[:, None].expand(-1, 3)
        return {
            "encoder_hidden_states": self.noise(self.text, 16),
            "timestep_indices": torch.zeros(sum(sizes), dtype=torch.long),
            "token_tags": torch.tensor([IS_TEXT] * self.text + [IS_AUDIO] * 8 + [IS_VIDEO] * 64),
            "position_ids": torch.cat([alike, torch.cartesian_prod(*map(torch.arange, (4, 4, 4)))]),
            "text_indices": text,
            "audio_indices": audio,
            "video_indices": video,
        }

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        video, audio = latents.split([64 * 16, 8 * 8], dim=1)
        velocities = self.transformer(
            video.unflatten(1, self._video),
            audio.unflatten(1, self._audio),
            timestep=1000 * time[:1],  # all that are there, of which each token has one
            **self.conditions,
            return_dict=False,
        )
        return torch.cat([velocity.flatten(1) for velocity in velocities], dim=1)


class MiniMaxH3Fused(MiniMaxH3):
    """As xDiT runs it: Q, K and V come out of one matrix."""

    is_fused = True
