"""Cosmos 3."""

from typing import Any

import torch
from torch import nn
from xfuser.model_executor.models.transformers.transformer_cosmos3 import get_cosmos3_transformer_wrapper_class

from tests.small_transformers.base import SmallTransformer


class Cosmos3(SmallTransformer):
    """48 video tokens. They attend to text too, of which each rank has all, and which K and V bring to the exchange."""

    latent_shape = (4, 3, 8, 8)  # C F R W

    def build(self) -> nn.Module:
        transformer = get_cosmos3_transformer_wrapper_class()(
            head_dim=16,
            hidden_size=64,
            intermediate_size=96,
            latent_channel=4,
            latent_patch_size=2,
            num_attention_heads=8,
            num_hidden_layers=2,
            num_key_value_heads=8,
            patch_latent_dim=16,
            rope_axes_dim=(4, 2, 2),
            vocab_size=64,
        )
        transformer._install_xfuser_processors()
        return transformer

    def condition(self) -> dict[str, Any]:
        text, video = torch.arange(self.text + 48).split([self.text, 48])
        places = torch.cartesian_prod(*map(torch.arange, (3, 4, 4)))
        return {
            "input_ids": torch.randint(64, (self.text,), generator=self._generator),
            "text_indexes": text,
            "position_ids": torch.cat([text[:, None].expand(-1, 3), self.text + places]).T,
            "und_len": self.text,
            "sequence_length": self.text + 48,
            "vision_token_shapes": [(3, 4, 4)],
            "vision_sequence_indexes": video,
            "vision_mse_loss_indexes": video,
            "vision_noisy_frame_indexes": [torch.arange(3)],
        }

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        given = {"vision_tokens": [latents], "vision_timesteps": 1000 * time.expand(48)}
        [velocity] = self.transformer(**given, **self.conditions)[0]
        return velocity
