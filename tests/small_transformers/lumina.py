"""Lumina 2."""

from typing import Any

import torch
from diffusers import Lumina2Transformer2DModel
from torch import nn
from xfuser.model_executor.models.transformers.transformer_lumina2 import xFuserLumina2Transformer2DWrapper

from tests.small_transformers.base import SmallTransformer


class Lumina2(SmallTransformer):
    """64 image tokens after the caption; 24 query heads share 8 key heads, packed in one exchange."""

    latent_shape = (4, 16, 16)  # C R W
    wrapper = xFuserLumina2Transformer2DWrapper
    longest = 16

    def build(self) -> nn.Module:
        return Lumina2Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            hidden_size=192,
            num_layers=2,
            num_refiner_layers=1,
            num_attention_heads=24,
            num_kv_heads=8,
            multiple_of=32,
            axes_dim_rope=(4, 2, 2),
            axes_lens=(64, 32, 32),
            cap_feat_dim=16,
        )

    def condition(self) -> dict[str, Any]:
        # Samples of unequal length, and lengths that do not divide, make the wrapper mask keys.
        lengths = torch.tensor([max(1, self.text - sample) for sample in range(self.batch)])
        return {
            "encoder_hidden_states": self.noise(self.longest, 16),
            "encoder_attention_mask": torch.arange(self.longest) < lengths[:, None],
        }

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return super().velocity(latents, (1 - time) / 1000)
