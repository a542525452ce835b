"""LTX-2."""

from typing import Any

import torch
from torch import nn
from xfuser.model_executor.models.transformers.transformer_ltx2 import xFuserLTX2VideoTransformer3DWrapper

from tests.small_transformers.base import SmallTransformer


class LTX2(SmallTransformer):
    """48 video tokens, exchanged in their self-attention only, and 8 audio tokens, in one row of latents."""

    _video, _audio = (48, 8), (8, 4)  # tokens, channels
    latent_shape = (48 * 8 + 8 * 4,)

    def sizes(self) -> dict[str, Any]:
        """Those in which models differ."""
        return {}

    def build(self) -> nn.Module:
        return xFuserLTX2VideoTransformer3DWrapper(
            in_channels=8,
            out_channels=8,
            num_attention_heads=8,
            attention_head_dim=16,
            cross_attention_dim=128,
            audio_in_channels=4,
            audio_out_channels=4,
            audio_num_attention_heads=8,
            audio_attention_head_dim=8,
            audio_cross_attention_dim=64,
            num_layers=2,
            caption_channels=16,
            rope_type="split",  # with the default the wrapper gathers RoPE along the wrong dim
            **self.sizes(),
        )

    def condition(self) -> dict[str, Any]:
        return {
            "encoder_hidden_states": self.noise(self.text, 16),
            "audio_encoder_hidden_states": self.noise(self.text, 16),
            "encoder_attention_mask": self.ones(self.text),
            "audio_encoder_attention_mask": self.ones(self.text),
            "num_frames": 3,
            "height": 4,
            "width": 4,
            "audio_num_frames": 8,
        }

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        video, audio = latents.split([48 * 8, 8 * 4], dim=1)
        velocities = self.transformer(
            video.unflatten(1, self._video),
            audio.unflatten(1, self._audio),
            timestep=1000 * time,
            sigma=time,
            **self.conditions,
            return_dict=False,
        )
        return torch.cat([velocity.flatten(1) for velocity in velocities], dim=1)


class LTX2Gated(LTX2):
    """LTX-2.3: gates on attention, and cross-attention that is modulated too."""

    def sizes(self) -> dict[str, Any]:
        return dict.fromkeys(("gated_attn", "audio_gated_attn", "cross_attn_mod", "audio_cross_attn_mod"), True)
