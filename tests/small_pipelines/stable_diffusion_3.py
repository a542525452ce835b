"""Stable Diffusion 3: xDiT's pipeline of its own, which its scripts call."""

import torch
from diffusers import SD3Transformer2DModel
from xfuser import xFuserStableDiffusion3Pipeline
from xfuser.config import EngineConfig

from tests.small_pipelines.base import NEGATIVE_PROMPT, PROMPT, SmallPipeline
from xfuser_cocodiff.models import sd35, weights


class SD3(SmallPipeline):
    """As 3.5, of which there is a small model, but for Q and K, which are not normalised."""

    def __init__(self, config: EngineConfig) -> None:
        pipeline = sd35.pipeline()
        sizes = {name: value for name, value in pipeline.transformer.config.items() if not name.startswith("_")}
        pipeline.transformer = SD3Transformer2DModel(**{**sizes, "qk_norm": None})
        pipeline.set_progress_bar_config(disable=True)
        self.pipeline = xFuserStableDiffusion3Pipeline(weights.fill(pipeline, seed=0), config)

    def run(self, steps: int) -> list[torch.Tensor]:
        made = self.pipeline(
            prompt=PROMPT,
            negative_prompt=NEGATIVE_PROMPT,
            height=128,
            width=128,
            num_inference_steps=steps,
            guidance_scale=4.0,
            max_sequence_length=43,  # beside CLIP's 77 tokens
            generator=torch.Generator().manual_seed(3),
            output_type="latent",
        )
        return [made.images] if made else []
