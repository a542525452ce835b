"""FLUX.1-Kontext, FLUX.1 with control, and FLUX.2-klein."""

from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from torch import nn
from xfuser.core.distributed import get_runtime_state, get_sequence_parallel_world_size, get_sp_group
from xfuser.core.distributed.runtime_state import DiTRuntimeState
from xfuser.model_executor.models.transformers.transformer_flux import (
    xFuserFlux1Transformer2DWrapper,
    xFuserFluxTransformer2DWrapper,
)
from xfuser.model_executor.models.transformers.transformer_flux2 import xFuserFlux2Transformer2DWrapper

from tests.small_transformers.base import STEPS, Pipeline, RowSliced, SmallTransformer, band_of

FLUX1 = {
    "patch_size": 1,
    "num_layers": 2,
    "num_single_layers": 2,
    "num_attention_heads": 8,
    "attention_head_dim": 16,
    "joint_attention_dim": 16,
    "pooled_projection_dim": 8,
    "guidance_embeds": True,
    "axes_dims_rope": (4, 6, 6),
}


def places(axes: int, image: int = 0) -> torch.Tensor:
    """Coordinates of 8 x 8 tokens, (64, axes); the first one tells images from each other."""
    row_and_column = torch.cartesian_prod(torch.arange(8), torch.arange(8))
    return torch.cat([torch.full((64, 1), image), row_and_column, torch.zeros(64, axes - 3, dtype=torch.long)], dim=1)


class Kontext(SmallTransformer):
    """FLUX.1-Kontext: text, then 64 image tokens and as many of an image to go by."""

    latent_shape = (64, 16)  # N C
    text = 16

    def build(self) -> nn.Module:
        return xFuserFlux1Transformer2DWrapper(in_channels=16, **FLUX1)

    def ready(self) -> None:
        get_runtime_state().set_input_parameters(
            height=128,
            width=128,
            batch_size=self.batch,
            num_inference_steps=STEPS,
            max_condition_sequence_length=self.text,
        )

    def condition(self) -> dict[str, Any]:
        self.reference = self.noise(*self.latent_shape)
        return {
            "encoder_hidden_states": self.noise(self.text, 16),
            "pooled_projections": self.noise(8),
            "guidance": 3.5 * self.ones(dtype=self.dtype),
            "img_ids": torch.cat([places(3), places(3, image=1)]),
            "txt_ids": torch.zeros(self.text, 3),
        }

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        # FLUX takes times up to 1.
        return super().velocity(torch.cat([latents, self.reference], dim=1), time / 1000)[:, :64]


class FluxControlPipeline(Pipeline):
    """The runtime state takes tokens of twice the size from the name."""


class FluxControl(RowSliced):
    """FLUX.1 with an image to go by in channels of its own, in the classes of PipeFusion."""

    latent_shape = (64, 16)  # N C
    text = 16
    wrapper = xFuserFluxTransformer2DWrapper
    pipeline_class = FluxControlPipeline

    def build(self) -> nn.Module:
        return FluxTransformer2DModel(in_channels=32, out_channels=16, **FLUX1)

    def ready(self) -> None:
        if get_sequence_parallel_world_size() == 1:
            self.wrapper = None  # it goes by stages, which one rank is not given
        super().ready()

    def set_input_parameters(self, state: DiTRuntimeState) -> None:
        state.set_input_parameters(
            height=128,
            width=128,
            batch_size=self.batch,
            num_inference_steps=STEPS,
            max_condition_sequence_length=self.text,
            split_text_embed_in_sp=self.splits_text,
        )

    def condition(self) -> dict[str, Any]:
        self.control = self.noise(*self.latent_shape)
        return {
            "encoder_hidden_states": self.own_text(self.noise(self.text, 16)),
            "pooled_projections": self.noise(8),
            "guidance": 3.5 * self.ones(dtype=self.dtype),
            "txt_ids": self.own_text(torch.zeros(self.text, 3)),
        }

    def rope(self, tokens: slice) -> dict[str, Any]:
        return {"img_ids": places(3)[tokens]}

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        band = band_of(torch.cat([latents, self.control], dim=-1))
        found = SmallTransformer.velocity(self, band, time / 1000)
        velocity = found[0] if isinstance(found, tuple) else found  # a stage has what goes to the next one too
        return get_sp_group().all_gather(velocity, dim=-2)


class Klein(SmallTransformer):
    """FLUX.2-klein, which knows no guidance, as it edits: text, 64 image tokens and as many of an image to go by."""

    latent_shape = (64, 16)  # N C
    text = 16

    def build(self) -> nn.Module:
        return xFuserFlux2Transformer2DWrapper(
            patch_size=1,
            in_channels=16,
            num_layers=2,
            num_single_layers=2,
            num_attention_heads=8,
            attention_head_dim=16,
            joint_attention_dim=16,
            timestep_guidance_channels=32,
            mlp_ratio=2.0,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=False,
        )

    def condition(self) -> dict[str, Any]:
        self.reference = self.noise(*self.latent_shape)
        image = torch.cat([places(4), places(4, image=10)])
        text = nn.functional.pad(torch.arange(self.text)[:, None], (3, 0))
        return {
            "encoder_hidden_states": self.noise(self.text, 16),
            "guidance": None,
            "img_ids": image.expand(self.batch, -1, -1),
            "txt_ids": text.expand(self.batch, -1, -1),
        }

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return super().velocity(torch.cat([latents, self.reference], dim=1), time / 1000)[:, :64]
