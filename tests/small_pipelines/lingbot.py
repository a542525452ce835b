"""LingBot-Video: xDiT's pipeline over a double of LingBot's."""

from typing import ClassVar

import torch
from xfuser.config import EngineConfig
from xfuser.model_executor.pipelines.pipeline_lingbot_video import (
    get_lingbot_video_pipeline_class,
    xFuserLingBotVideoPipeline,
)

from tests.small_pipelines.base import SmallPipeline, noise
from tests.small_transformers import lingbot
from xfuser_cocodiff.models import weights


class LingBotVideo(SmallPipeline):
    """A video from text, guided by one that it is not to be, in a call of its own or on ranks of its own."""

    sizes: ClassVar = lingbot.LingBotVideo.sizes

    def __init__(self, config: EngineConfig) -> None:
        from lingbot_video.scheduling_flow_unipc import FlowUniPCMultistepScheduler

        base = get_lingbot_video_pipeline_class()
        parts = dict.fromkeys(("vae", "text_encoder", "processor"))
        transformer = lingbot.wrapped(**self.sizes)
        self.pipeline = base(transformer=transformer, scheduler=FlowUniPCMultistepScheduler(), **parts)
        weights.fill(self.pipeline, seed=0)
        # As xDiT's runner makes it.
        self.pipeline.__class__ = type("xFuserLingBotVideoPipeline", (xFuserLingBotVideoPipeline, base), {})
        self.pipeline.set_progress_bar_config(disable=True)

    def run(self, steps: int) -> list[torch.Tensor]:
        made = self.pipeline(
            height=128,
            width=128,
            num_frames=9,
            num_inference_steps=steps,
            guidance_scale=3.0,
            generator=torch.Generator().manual_seed(3),
            prompt_embeds=noise(1, 16, 16, seed=1),
            prompt_mask=torch.ones(1, 16, dtype=torch.long),
            negative_prompt_embeds=noise(1, 12, 16, seed=2),
            negative_prompt_mask=torch.ones(1, 12, dtype=torch.long),
            output_type="latent",
        )
        return [made.frames]


class LingBotVideoMoE(LingBotVideo):
    """With experts."""

    sizes: ClassVar = lingbot.LingBotVideoMoE.sizes
