"""Krea 2."""

from typing import Any

import torch
from torch import nn
from xfuser.model_executor.models.transformers.transformer_krea2 import xFuserKrea2Transformer2DWrapper

from tests.small_transformers.base import SmallTransformer


class Krea2(SmallTransformer):
    """Text, then 64 image tokens; each K/V head is sent as often as there are Q heads that share it."""

    latent_shape = (64, 16)  # N C
    kv_heads = 4
    is_masked = False

    def build(self) -> nn.Module:
        return xFuserKrea2Transformer2DWrapper(
            in_channels=16,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=8,
            num_key_value_heads=self.kv_heads,
            intermediate_size=64,
            timestep_embed_dim=32,
            text_hidden_dim=32,
            num_text_layers=3,
            text_num_attention_heads=4,
            text_num_key_value_heads=4,
            text_intermediate_size=48,
            num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1,
            axes_dims_rope=(4, 6, 6),
        )

    def condition(self) -> dict[str, Any]:
        image = nn.functional.pad(torch.cartesian_prod(torch.arange(8), torch.arange(8)), (1, 0))
        conditions = {
            "encoder_hidden_states": self.noise(self.text, 3, 32),
            "position_ids": torch.cat([torch.zeros(self.text, 3, dtype=torch.long), image]),
        }
        if self.is_masked:
            lengths = torch.tensor([self.text - 3 - sample for sample in range(self.batch)])
            conditions["encoder_attention_mask"] = torch.arange(self.text) < lengths[:, None]
        return conditions

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return super().velocity(latents, time / 1000)


class Krea2Masked(Krea2):
    """With prompts of several lengths, of which the rest is masked."""

    is_masked = True


class Krea2AllHeads(Krea2):
    """With as many K/V heads as Q heads."""

    kv_heads = 8
