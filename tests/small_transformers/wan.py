"""Wan 2.1 and 2.2: video tokens alone are exchanged; text and images are seen in cross-attention."""

from typing import Any

import torch
from torch import nn
from xfuser.model_executor.models.transformers.transformer_wan import xFuserWanTransformer3DWrapper
from xfuser.model_executor.models.transformers.transformer_wan_vace import xFuserWanVACETransformer3DWrapper

from tests.small_transformers.base import SmallTransformer


class Wan(SmallTransformer):
    """Wan 2.1 text to video: 192 video tokens."""

    latent_shape = (4, 3, 16, 16)  # C F R W
    wrapped: type[nn.Module] = xFuserWanTransformer3DWrapper

    def sizes(self) -> dict[str, Any]:
        """Those in which models differ."""
        return {"in_channels": 4}

    def build(self) -> nn.Module:
        return self.wrapped(
            patch_size=(1, 2, 2),
            num_attention_heads=8,
            attention_head_dim=24,
            out_channels=4,
            text_dim=16,
            freq_dim=256,
            ffn_dim=64,
            num_layers=2,
            rope_max_seq_len=32,
            **self.sizes(),
        )

    def condition(self) -> dict[str, Any]:
        return {"encoder_hidden_states": self.noise(self.text, 16)}


class WanI2V(Wan):
    """Wan 2.1 image to video: the first frame comes in channels of its own, and as tokens of an image encoder."""

    text = 512  # what the model cuts image tokens off by

    def sizes(self) -> dict[str, Any]:
        return {"in_channels": 8, "image_dim": 16, "added_kv_proj_dim": 192}

    def condition(self) -> dict[str, Any]:
        self.image = self.noise(*self.latent_shape)
        return super().condition() | {"encoder_hidden_states_image": self.noise(257, 16)}

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return super().velocity(torch.cat([latents, self.image], dim=1), time)


class WanTI2V(Wan):
    """Wan 2.2 with 5B parameters: each token has a time of its own, and the first frame is given, so that its is 0."""

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        is_made = torch.arange(3 * 64) >= 64
        return super().velocity(latents, time[:, None] * is_made)


class WanA14B(Wan):
    """Wan 2.2 with two times 14B parameters: the second transformer takes over in the middle of a run."""

    count = 2

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        self.transformer = self.transformers[time[0] <= 0.5]
        return super().velocity(latents, time)


class WanVACE(Wan):
    """Wan VACE: layers beside the others see a video to go by."""

    wrapped = xFuserWanVACETransformer3DWrapper

    def sizes(self) -> dict[str, Any]:
        return {"in_channels": 4, "vace_layers": [0, 1], "vace_in_channels": 12}

    def condition(self) -> dict[str, Any]:
        return super().condition() | {"control_hidden_states": self.noise(12, *self.latent_shape[1:])}
