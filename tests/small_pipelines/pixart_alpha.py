"""PixArt-Alpha: xDiT's pipeline of its own, which its scripts call."""

import torch
from xfuser import xFuserPixArtAlphaPipeline
from xfuser.config import EngineConfig

from tests.example_models import pixart
from tests.small_pipelines.base import NEGATIVE_PROMPT, PROMPT, SmallPipeline


class PixArtAlpha(SmallPipeline):
    """With the size of the picture among its conditions, as that for 1024 pixels has it."""

    def __init__(self, config: EngineConfig) -> None:
        pipeline = pixart.alpha()
        pipeline.set_progress_bar_config(disable=True)
        self.pipeline = xFuserPixArtAlphaPipeline(pipeline, config)

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
