"""MiniMax-H3: the blocks of its modular pipeline from an encoded prompt to latents."""

from types import SimpleNamespace
from typing import Any

import torch
from diffusers import MiniMaxH3Scheduler
from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3ImageReference
from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import (
    MiniMaxH3CoreDenoiseStep,
    MiniMaxH3Ref2VACoreDenoiseStep,
)
from xfuser.config import EngineConfig

from tests.small_pipelines.base import SmallPipeline, noise
from tests.small_transformers.minimax import IS_TEXT, wrapped
from xfuser_cocodiff.models import weights

VIDEO_CHANNELS, AUDIO_CHANNELS, TEXT = 24, 32, 12
"""Channels of latents without the autoencoders that would say others, and text tokens."""
FRAMES = 124
"""The fewest that it makes: 5 seconds, as 37 frames and 207 moments of sound."""


class MiniMaxH3(SmallPipeline):
    """A video and its sound from text."""

    blocks: type = MiniMaxH3CoreDenoiseStep
    transformer = "transformer"

    def __init__(self, config: EngineConfig) -> None:
        self.modular = self.blocks().init_pipeline()
        transformer = wrapped(VIDEO_CHANNELS, AUDIO_CHANNELS)
        schedulers = {"scheduler": MiniMaxH3Scheduler(), "audio_scheduler": MiniMaxH3Scheduler(shift=3.0)}
        self.modular.update_components(**{self.transformer: transformer}, **schedulers)
        weights.fill(self.modular, seed=0)
        transformer.fuse_qkv_projections()  # as xDiT's runner does
        self.pipeline = SimpleNamespace(transformer=transformer)
        self.modular.set_progress_bar_config(disable=True)

    def conditions(self) -> dict[str, Any]:
        """What it is given beside text."""
        return {}

    def run(self, steps: int) -> list[torch.Tensor]:
        state = self.modular(
            prompt_embeds=noise(1, TEXT, 16, seed=1),
            text_token_tags=torch.full((TEXT,), IS_TEXT),
            height=64,
            width=64,
            num_frames=FRAMES,
            num_inference_steps=steps + 1,  # the last of which is where it ends
            generator=torch.Generator().manual_seed(3),
            **self.conditions(),
        )
        return [state.get("latents"), state.get("audio_latents")]


class MiniMaxH3Ref2VA(MiniMaxH3):
    """The same from a picture beside the text, by another transformer."""

    blocks = MiniMaxH3Ref2VACoreDenoiseStep
    transformer = "transformer_ref"

    def conditions(self) -> dict[str, Any]:
        return {
            "normalized_references": [MiniMaxH3ImageReference(image=torch.zeros(3, 64, 64))],
            "condition_latents": [noise(1, VIDEO_CHANNELS, 1, 4, 4, seed=2)],
            "audio_condition_latents": [],
        }
