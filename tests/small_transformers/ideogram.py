"""Ideogram 4."""

from typing import Any

import torch
from torch import nn
from xfuser.model_executor.models.transformers.transformer_ideogram4 import get_ideogram4_transformer_wrapper_class

from tests.small_transformers.base import Pipeline, SmallTransformer

PAD = 5
IS_PAD, IS_IMAGE, IS_TEXT = 0, 2, 3


class Ideogram4(SmallTransformer):
    """Padding, which the wrapper leaves out, then text and 64 image tokens."""

    latent_shape = (64, 8)  # N C

    def build(self) -> nn.Module:
        transformer = get_ideogram4_transformer_wrapper_class()(
            in_channels=8,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=8,
            intermediate_size=64,
            adaln_dim=32,
            llm_features_dim=24,
            mrope_section=(4, 2, 2),
        )
        transformer._install_xfuser_processors()
        return transformer

    def ready(self) -> None:
        for transformer in self.transformers:
            transformer._init_sp_state()

    def condition(self) -> dict[str, Any]:
        indicator = torch.tensor([IS_PAD] * PAD + [IS_TEXT] * self.text + [IS_IMAGE] * 64)
        text = torch.arange(PAD + self.text)[:, None].expand(-1, 3)
        image = 2**16 + nn.functional.pad(torch.cartesian_prod(torch.arange(8), torch.arange(8)), (1, 0))
        return {
            "encoder_hidden_states": self.noise(PAD + self.text + 64, 24),
            "position_ids": torch.cat([text, image]).expand(self.batch, -1, -1),
            "segment_ids": torch.where(indicator == IS_PAD, -1, 1).expand(self.batch, -1),
            "indicator": indicator.expand(self.batch, -1),
        }

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        # Its times go from 0 to 1, and all of the sequence has room for an image.
        padded = nn.functional.pad(latents, (0, 0, PAD + self.text, 0))
        return super().velocity(padded, (1 - time) / 1000)[:, -64:]


class IdeogramPipeline(Pipeline):
    """With a second transformer for what goes without text."""

    second = "unconditional_transformer"


class Ideogram4Guided(Ideogram4):
    """With guidance, for which a second transformer sees the image alone."""

    count = 2
    pipeline_class = IdeogramPipeline

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        image = {name: given[:, -64:] for name, given in self.conditions.items()}
        image["encoder_hidden_states"] = torch.zeros_like(image["encoder_hidden_states"])
        without = self.transformers[1](latents, timestep=1 - time, **image, return_dict=False)[0]
        return without + 3 * (super().velocity(latents, time) - without)
