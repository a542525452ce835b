"""HunyuanVideo, HunyuanVideo-1.5 and HunyuanDiT."""

from typing import Any

import torch
from diffusers import HunyuanDiT2DModel
from diffusers.models.embeddings import get_2d_rotary_pos_embed
from torch import nn
from xfuser.model_executor.models.transformers.hunyuan_transformer_2d import xFuserHunyuanDiT2DWrapper
from xfuser.model_executor.models.transformers.transformer_hunyuan_video import xFuserHunyuanVideoTransformer3DWrapper
from xfuser.model_executor.models.transformers.transformer_hunyuan_video15 import (
    xFuserHunyuanVideo15Transformer3DWrapper,
)

from tests.small_transformers.base import RowSliced, SmallTransformer


class HunyuanVideo(SmallTransformer):
    """192 video tokens, then text; text that does not divide is replicated and joins at the rear."""

    latent_shape = (4, 3, 16, 16)  # C F R W

    def build(self) -> nn.Module:
        transformer = xFuserHunyuanVideoTransformer3DWrapper(
            in_channels=4,
            out_channels=4,
            num_attention_heads=8,
            attention_head_dim=16,
            num_layers=2,
            num_single_layers=2,
            num_refiner_layers=1,
            mlp_ratio=2.0,
            patch_size=2,
            patch_size_t=1,
            guidance_embeds=True,
            text_embed_dim=16,
            pooled_projection_dim=8,
            rope_axes_dim=(4, 6, 6),
        )
        # The constructor leaves diffusers' processors, which exchange nothing.
        return transformer.install_xdit_attention_processors()

    def condition(self) -> dict[str, Any]:
        # The last token is padding in every sample: the model drops it before it looks at the length.
        mask = self.ones(self.text + 1)
        mask[:, -1] = 0
        return {
            "encoder_hidden_states": self.noise(self.text + 1, 16),
            "encoder_attention_mask": mask,
            "pooled_projections": self.noise(8),
            "guidance": 6000 * self.ones(dtype=self.dtype),
        }


class HunyuanVideo15(SmallTransformer):
    """768 video tokens, then text of two encoders, which joins at the rear where it does not divide."""

    latent_shape = (4, 3, 16, 16)  # C F R W
    task = "t2v"

    def build(self) -> nn.Module:
        return xFuserHunyuanVideo15Transformer3DWrapper(
            in_channels=9,
            out_channels=4,
            num_attention_heads=8,
            attention_head_dim=16,
            num_layers=2,
            num_refiner_layers=1,
            mlp_ratio=2.0,
            patch_size=1,
            patch_size_t=1,
            text_embed_dim=16,
            text_embed_2_dim=16,
            image_embed_dim=12,
            rope_axes_dim=(4, 6, 6),
            target_size=640,
            task_type=self.task,
        )

    def condition(self) -> dict[str, Any]:
        glyphs, frames = 4, self.latent_shape[1:]
        self.given = torch.zeros(self.batch, 5, *frames, dtype=self.dtype)
        return {
            "encoder_hidden_states": self.noise(self.text - glyphs, 16),
            "encoder_attention_mask": self.ones(self.text - glyphs),
            "encoder_hidden_states_2": self.noise(glyphs, 16),
            "encoder_attention_mask_2": self.ones(glyphs),
            "image_embeds": torch.zeros(self.batch, 3, 12, dtype=self.dtype),
        }

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return super().velocity(torch.cat([latents, self.given], dim=1), time)


class HunyuanVideo15I2V(HunyuanVideo15):
    """The same with an image: three more tokens, and frames that are given, in channels of their own."""

    task = "i2v"

    def condition(self) -> dict[str, Any]:
        conditions = super().condition()
        self.given = self.noise(*self.given.shape[1:])
        return conditions | {"image_embeds": self.noise(3, 12)}


class HunyuanDiT(RowSliced):
    """64 image tokens and skip connections, exchanged in self-attention only."""

    latent_shape = (4, 16, 16)  # C R W
    wrapper = xFuserHunyuanDiT2DWrapper

    def build(self) -> nn.Module:
        return HunyuanDiT2DModel(
            num_attention_heads=8,
            attention_head_dim=16,
            in_channels=4,
            patch_size=2,
            sample_size=16,
            hidden_size=128,
            num_layers=4,
            mlp_ratio=2.0,
            cross_attention_dim=32,
            cross_attention_dim_t5=24,
            pooled_projection_dim=16,
            text_len=6,
            text_len_t5=8,
        )

    def condition(self) -> dict[str, Any]:
        return {
            "encoder_hidden_states": self.noise(6, 32),
            "text_embedding_mask": self.ones(6),
            "encoder_hidden_states_t5": self.noise(8, 24),
            "text_embedding_mask_t5": self.ones(8),
            "image_meta_size": torch.tensor([128, 128, 128, 128, 0, 0], dtype=self.dtype).repeat(self.batch, 1),
            "style": 0 * self.ones(),
        }

    def rope(self, tokens: slice) -> dict[str, Any]:
        whole = get_2d_rotary_pos_embed(16, ((0, 0), (8, 8)), (8, 8), output_type="pt")
        return {"image_rotary_emb": tuple(part[tokens] for part in whole)}
