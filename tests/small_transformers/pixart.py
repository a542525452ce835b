"""PixArt-Sigma."""

from typing import Any

from diffusers import PixArtTransformer2DModel
from torch import nn
from xfuser.model_executor.models.transformers.pixart_transformer_2d import xFuserPixArtTransformer2DWrapper

from tests.small_transformers.base import RowSliced


class PixArtSigma(RowSliced):
    """64 image tokens, exchanged in self-attention only."""

    latent_shape = (4, 16, 16)  # C R W
    wrapper = xFuserPixArtTransformer2DWrapper

    def build(self) -> nn.Module:
        return PixArtTransformer2DModel(
            num_attention_heads=8,
            attention_head_dim=16,
            num_layers=2,
            sample_size=16,
            patch_size=2,
            in_channels=4,
            out_channels=8,
            caption_channels=32,
            cross_attention_dim=128,
            use_additional_conditions=False,
        )

    def condition(self) -> dict[str, Any]:
        return {
            "encoder_hidden_states": self.noise(self.text, 32),
            "encoder_attention_mask": self.ones(self.text),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        }
