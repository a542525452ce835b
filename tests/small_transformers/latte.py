"""Latte."""

from typing import Any

from diffusers import LatteTransformer3DModel
from torch import nn
from xfuser.core.distributed.runtime_state import DiTRuntimeState
from xfuser.model_executor.models.transformers.latte_transformer_3d import xFuserLatteTransformer3DWrapper

from tests.small_transformers.base import STEPS, RowSliced


class Latte(RowSliced):
    """3 frames of 64 tokens, exchanged in the self-attention of a frame, and in that over time."""

    latent_shape = (4, 3, 16, 16)  # C F R W
    wrapper = xFuserLatteTransformer3DWrapper

    def build(self) -> nn.Module:
        return LatteTransformer3DModel(
            num_attention_heads=8,
            attention_head_dim=16,
            in_channels=4,
            out_channels=8,
            num_layers=2,
            cross_attention_dim=128,
            attention_bias=True,
            sample_size=16,
            patch_size=2,
            activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            caption_channels=32,
            video_length=3,
        )

    def condition(self) -> dict[str, Any]:
        return {"encoder_hidden_states": self.noise(self.text, 32)}

    def set_input_parameters(self, state: DiTRuntimeState) -> None:
        state.set_video_input_parameters(
            height=128, width=128, num_frames=3, batch_size=self.batch, num_inference_steps=STEPS
        )
