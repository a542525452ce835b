"""Qwen-Image-Edit."""

from typing import Any

import torch
from torch import nn
from xfuser.model_executor.models.transformers.transformer_qwen import xFuserQwenImageTransformerWrapper

from tests.small_transformers.base import SmallTransformer


class QwenEdit(SmallTransformer):
    """Text, then 64 image tokens and as many of an image to go by."""

    latent_shape = (64, 16)  # N C
    references = ((1, 8, 8),)
    """Images to go by: F R W."""

    def build(self) -> nn.Module:
        return xFuserQwenImageTransformerWrapper(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            num_attention_heads=8,
            attention_head_dim=16,
            joint_attention_dim=16,
            axes_dims_rope=(4, 6, 6),
        )

    def condition(self) -> dict[str, Any]:
        self.given = [self.noise(rows * columns, 16) for _, rows, columns in self.references]
        return {
            "encoder_hidden_states": self.noise(self.text, 16),
            "img_shapes": [[(1, 8, 8), *self.references]] * self.batch,
        }

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return super().velocity(torch.cat([latents, *self.given], dim=1), time / 1000)[:, :64]


class QwenEditPlus(QwenEdit):
    """The same with two images to go by."""

    references = ((1, 4, 8), (1, 8, 4))
