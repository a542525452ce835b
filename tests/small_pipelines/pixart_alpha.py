"""PixArt-Alpha: xDiT's pipeline of its own, which its scripts call."""

import torch
from diffusers import DPMSolverMultistepScheduler, PixArtAlphaPipeline, PixArtTransformer2DModel
from xfuser import xFuserPixArtAlphaPipeline
from xfuser.config import EngineConfig

from tests.small_pipelines.base import NEGATIVE_PROMPT, PROMPT, SmallPipeline
from xfuser_cocodiff.models import lumina2, sd35, tokenizers, weights

HEADS, HEAD_DIM = 8, 24


class PixArtAlpha(SmallPipeline):
    """With the size of the picture among its conditions, as that for 1024 pixels has it."""

    def __init__(self, config: EngineConfig) -> None:
        t5 = tokenizers.t5()
        pipeline = PixArtAlphaPipeline(
            tokenizer=t5,
            text_encoder=sd35.t5_encoder(t5),
            vae=lumina2.autoencoder(),
            transformer=transformer(),
            scheduler=DPMSolverMultistepScheduler(),
        )
        pipeline.set_progress_bar_config(disable=True)
        self.pipeline = xFuserPixArtAlphaPipeline(weights.fill(pipeline, seed=0), config)

    def run(self, steps: int) -> list[torch.Tensor]:
        made = self.pipeline(
            prompt=PROMPT,
            negative_prompt=NEGATIVE_PROMPT,
            height=128,
            width=128,
            num_inference_steps=steps,
            generator=torch.Generator().manual_seed(3),
            output_type="latent",
            clean_caption=False,
            use_resolution_binning=False,
        )
        return [made.images] if made else []


def transformer() -> PixArtTransformer2DModel:
    """2 blocks, for latents of 4 channels."""
    return PixArtTransformer2DModel(
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        num_layers=2,
        sample_size=128,
        patch_size=2,
        in_channels=lumina2.LATENT_CHANNELS,
        out_channels=2 * lumina2.LATENT_CHANNELS,  # the variance too
        caption_channels=sd35.TEXT_WIDTH,
        cross_attention_dim=HEADS * HEAD_DIM,
    )
