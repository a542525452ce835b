"""Sana."""

from typing import Any

from diffusers import SanaTransformer2DModel
from torch import nn
from xfuser.core.distributed.runtime_state import DiTRuntimeState
from xfuser.model_executor.models.transformers.sana_transformer_2d import xFuserSanaTransformer2DWrapper

from tests.small_transformers.base import STEPS, RowSliced


class Sana(RowSliced):
    """256 image tokens. Linear self-attention exchanges them by yunchang, and cross-attention, by USP, text as well, of
    which each rank has all."""

    latent_shape = (4, 16, 16)  # C R W
    wrapper = xFuserSanaTransformer2DWrapper

    def build(self) -> nn.Module:
        return SanaTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=8,
            attention_head_dim=16,
            num_layers=2,
            num_cross_attention_heads=8,
            cross_attention_head_dim=16,
            cross_attention_dim=128,
            caption_channels=32,
            sample_size=16,
            patch_size=1,
        )

    def set_input_parameters(self, state: DiTRuntimeState) -> None:
        state.set_input_parameters(
            height=128,
            width=128,
            batch_size=self.batch,
            num_inference_steps=STEPS,
            split_text_embed_in_sp=False,
        )

    def condition(self) -> dict[str, Any]:
        return {"encoder_hidden_states": self.noise(self.text, 32)}
