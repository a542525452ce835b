"""Small pipelines with their own denoising loops; each is built once in a rank, with a new runtime state per run."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from diffusers import DiffusionPipeline, MiniMaxH3Scheduler, SD3Transformer2DModel
from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3ImageReference
from diffusers.modular_pipelines.minimax_h3.modular_blocks_minimax_h3 import (
    MiniMaxH3CoreDenoiseStep,
    MiniMaxH3Ref2VACoreDenoiseStep,
)
from xfuser import xFuserPixArtAlphaPipeline, xFuserStableDiffusion3Pipeline
from xfuser.config import EngineConfig
from xfuser.model_executor.models.transformers.transformer_lingbot_video import (
    get_lingbot_video_classes,
    xFuserLingBotVideoTransformer3DWrapper,
)
from xfuser.model_executor.pipelines.pipeline_lingbot_video import (
    get_lingbot_video_pipeline_class,
    xFuserLingBotVideoPipeline,
)

from models import sd35, weights
from tests import example_models
from tests.sizes import build
from tests.small_transformers import videos


def noise(*shape: int, seed: int) -> torch.Tensor:
    """Return noise that is the same on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class SmallPipeline:
    """A pipeline with its arguments."""

    pipeline: Any
    """Pipeline from which the runtime state is created."""

    def __init__(self, config: EngineConfig) -> None:
        """Build the pipeline, with stock's config."""

    def run(self, steps: int) -> list[torch.Tensor]:
        """Denoise, and return the outputs on this rank; empty on ranks without."""
        raise NotImplementedError


class Scripted(SmallPipeline):
    """A pipeline class of xDiT, as its example scripts use it."""

    kind: type
    options: ClassVar[dict[str, Any]]

    def __init__(self, config: EngineConfig) -> None:
        pipeline = self.plain()
        pipeline.set_progress_bar_config(disable=True)
        self.pipeline = self.kind(pipeline, config)

    def plain(self) -> DiffusionPipeline:
        """Return the wrapped pipeline of diffusers."""
        raise NotImplementedError

    def run(self, steps: int) -> list[torch.Tensor]:
        made = self.pipeline(
            prompt="a photo of a cat",
            negative_prompt="old coins",
            height=128,
            width=128,
            num_inference_steps=steps,
            generator=torch.Generator().manual_seed(3),
            output_type="latent",
            **self.options,
        )
        return [made.images] if made else []


class PixArtAlpha(Scripted):
    """PixArt-Alpha with the image size among its conditions, as the model for 1024 pixels."""

    kind = xFuserPixArtAlphaPipeline
    options: ClassVar = {"clean_caption": False, "use_resolution_binning": False}

    def plain(self) -> DiffusionPipeline:
        return example_models.pixart_alpha()


class SD3(Scripted):
    """Stable Diffusion 3: as the small model of 3.5, but with random weights and without normalization of Q and K."""

    kind = xFuserStableDiffusion3Pipeline
    options: ClassVar = {"guidance_scale": 4.0, "max_sequence_length": 43}  # in addition to CLIP's 77 tokens

    def plain(self) -> DiffusionPipeline:
        pipeline = sd35.pipeline()
        sizes = {name: value for name, value in pipeline.transformer.config.items() if not name.startswith("_")}
        # With random weights, more or narrower layers would amplify errors of codecs.
        sizes |= {"num_layers": 4, "num_attention_heads": 24, "attention_head_dim": 8, "caption_projection_dim": 192}
        pipeline.transformer = SD3Transformer2DModel(**{**sizes, "qk_norm": None})
        return weights.fill(pipeline, seed=0)


class MiniMaxH3(SmallPipeline):
    """MiniMax-H3's modular blocks from an encoded prompt to latents: video and audio from text."""

    blocks: type = MiniMaxH3CoreDenoiseStep
    transformer = "transformer"
    video_channels, audio_channels, text = 24, 32, 12
    """Channels of the latents, which the autoencoders would set otherwise, and the number of text tokens."""
    frames = 124
    """The shortest output: 5 seconds, in 37 frames and 207 audio tokens."""

    def __init__(self, config: EngineConfig) -> None:
        self.modular = self.blocks().init_pipeline()
        sizes = {"in_channels": self.video_channels, "audio_in_channels": self.audio_channels}
        transformer = build(videos.MiniMaxH3.model, **videos.MiniMaxH3.sizes | sizes)
        schedulers = {"scheduler": MiniMaxH3Scheduler(), "audio_scheduler": MiniMaxH3Scheduler(shift=3.0)}
        self.modular.update_components(**{self.transformer: transformer}, **schedulers)
        weights.fill(self.modular, seed=0)
        transformer.fuse_qkv_projections()  # as in xDiT's runner
        self.pipeline = SimpleNamespace(transformer=transformer)
        self.modular.set_progress_bar_config(disable=True)

    def conditions(self) -> dict[str, Any]:
        """Return the inputs in addition to the text."""
        return {}

    def run(self, steps: int) -> list[torch.Tensor]:
        state = self.modular(
            prompt_embeds=noise(1, self.text, 16, seed=1),
            text_token_tags=torch.full((self.text,), videos.IS_TEXT),
            height=64,
            width=64,
            num_frames=self.frames,
            num_inference_steps=steps + 1,  # the last one is the end of the schedule
            generator=torch.Generator().manual_seed(3),
            **self.conditions(),
        )
        return [state.get("latents"), state.get("audio_latents")]


class MiniMaxH3Ref2VA(MiniMaxH3):
    """Video and audio from a picture and text, by another transformer."""

    blocks = MiniMaxH3Ref2VACoreDenoiseStep
    transformer = "transformer_ref"

    def conditions(self) -> dict[str, Any]:
        return {
            "normalized_references": [MiniMaxH3ImageReference(image=torch.zeros(3, 64, 64))],
            "condition_latents": [noise(1, self.video_channels, 1, 4, 4, seed=2)],
            "audio_condition_latents": [],
        }


class LingBotVideo(SmallPipeline):
    """xDiT's pipeline over a mock of LingBot's: video from text, with the guidance branch in a second call or on other
    ranks."""

    def __init__(self, config: EngineConfig) -> None:
        sys.path.append(str(Path(__file__).parents[1] / "stand_ins"))
        from lingbot_video.scheduling_flow_unipc import FlowUniPCMultistepScheduler

        plain, base = get_lingbot_video_classes()[0], get_lingbot_video_pipeline_class()
        transformer = build(plain, hidden_size=128, depth=2, freq_dim=32, axes_dims=(4, 6, 6))
        parts = dict.fromkeys(("vae", "text_encoder", "processor"))
        self.pipeline = base(transformer=transformer, scheduler=FlowUniPCMultistepScheduler(), **parts)
        weights.fill(self.pipeline, seed=0)
        # As in the wrappers' from_pretrained, their only constructor.
        for wrapped, wrapper in (
            (transformer, xFuserLingBotVideoTransformer3DWrapper),
            (self.pipeline, xFuserLingBotVideoPipeline),
        ):
            wrapped.__class__ = type(wrapper.__name__, (wrapper, type(wrapped)), {})
        transformer._install_usp_attention()
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
