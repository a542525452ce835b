"""A pipeline with the loop of LingBot-Video's, from prompts that are encoded to latents."""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.utils import BaseOutput
from diffusers.utils.torch_utils import randn_tensor
from torch import nn


@dataclass
class LingBotVideoPipelineOutput(BaseOutput):
    frames: torch.Tensor


def _module_dtype(module: nn.Module) -> torch.dtype:
    return next(module.parameters()).dtype


def _transformer_timestep(timestep: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A timestep as precise as the model's dtype has it."""
    return 1000 * (timestep.float() / 1000).to(dtype).float()


def _transformer_autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext()


class LingBotVideoPipeline(DiffusionPipeline):
    _optional_components = ("vae", "text_encoder", "processor")

    def __init__(self, transformer: nn.Module, vae: Any, text_encoder: Any, processor: Any, scheduler: Any) -> None:
        super().__init__()
        self.register_modules(
            transformer=transformer, vae=vae, text_encoder=text_encoder, processor=processor, scheduler=scheduler
        )
        self.vae_scale_factor_temporal, self.vae_scale_factor_spatial = 4, 8

    @staticmethod
    def check_inputs(height: int, width: int, num_frames: int) -> None:
        assert height % 16 == width % 16 == 0 and num_frames % 4 == 1

    def prepare_latents(
        self, num_frames: int, height: int, width: int, generator: torch.Generator, latents: None, device: torch.device
    ) -> torch.Tensor:
        frames = (num_frames - 1) // self.vae_scale_factor_temporal + 1
        sizes = (size // self.vae_scale_factor_spatial for size in (height, width))
        shape = 1, self.transformer.config.in_channels, frames, *sizes
        return randn_tensor(shape, generator=generator, device=device, dtype=torch.float32)

    @torch.no_grad()
    def __call__(
        self,
        *,
        height: int,
        width: int,
        num_frames: int,
        num_inference_steps: int,
        guidance_scale: float,
        shift: float,
        prompt_embeds: torch.Tensor,
        prompt_mask: torch.Tensor,
        negative_prompt_embeds: torch.Tensor,
        negative_prompt_mask: torch.Tensor,
        generator: torch.Generator,
        **_: Any,
    ) -> LingBotVideoPipelineOutput:
        self.check_inputs(height, width, num_frames)
        device, dtype = self._execution_device, _module_dtype(self.transformer)
        latents = self.prepare_latents(num_frames, height, width, generator, None, device)
        self.scheduler.set_timesteps(num_inference_steps, device=device, shift=shift)
        for timestep in self.progress_bar(self.scheduler.timesteps):
            time = _transformer_timestep(timestep, dtype).expand(1).to(device)
            branches = []
            for embeds, mask in ((prompt_embeds, prompt_mask), (negative_prompt_embeds, negative_prompt_mask)):
                given = latents, time, embeds.to(dtype)  # cast anew in each call
                branches.append(self.transformer(*given, encoder_attention_mask=mask, return_dict=False)[0].float())
            predicted, other = branches
            predicted = other + guidance_scale * (predicted - other)
            latents = self.scheduler.step(predicted, timestep, latents, return_dict=False, generator=generator)[0]
        self.maybe_free_model_hooks()
        return LingBotVideoPipelineOutput(frames=latents)
