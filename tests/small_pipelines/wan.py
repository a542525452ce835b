"""Wan's image-to-video pipelines: 9 frames of 128 x 128 pixels as 192 tokens, with 24 heads of 8."""

from typing import Any

from diffusers import (
    WanImageToVideoPipeline,
    WanTransformer3DModel,
    WanVACEPipeline,
    WanVACETransformer3DModel,
)
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel

from small_models import tokenizers, weights
from small_models.wan import LATENT_CHANNELS, SIZES, autoencoder, scheduler, text_encoder

ENCODER_WIDTH = 32
MASK_CHANNELS, VACE_MASK_CHANNELS = 4, 64
"""Channels of the masks: a frame has one for each of 4 frames per latent frame; VACE's one for each of 8 x 8 pixels."""


def image_to_video(has_encoder: bool = False, expands: bool = False) -> WanImageToVideoPipeline:
    """Return a pipeline that continues a first frame.

    Args:
        has_encoder: whether an image encoder embeds the frame too, as in 2.1.
        expands: whether each token has its own timestep, and the frame is part of the latents, as in 2.2's TI2V.
    """
    sizes: dict[str, Any] = dict(SIZES) if expands else {**SIZES, "in_channels": 2 * LATENT_CHANNELS + MASK_CHANNELS}
    if has_encoder:
        sizes |= {
            "image_dim": ENCODER_WIDTH,
            "added_kv_proj_dim": SIZES["num_attention_heads"] * SIZES["attention_head_dim"],
        }
    pipe = WanImageToVideoPipeline(
        **_common_parts(),
        image_encoder=image_encoder() if has_encoder else None,
        image_processor=CLIPImageProcessorPil() if has_encoder else None,
        transformer=WanTransformer3DModel(**sizes),
        transformer_2=None,
        expand_timesteps=expands,
    )
    return weights.fill(pipe, seed=0)


def image_encoder() -> CLIPVisionModel:
    """Return a two-layer CLIP, with 49 patches and a class token for 224 x 224 pixels."""
    config = CLIPVisionConfig(
        hidden_size=ENCODER_WIDTH, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, patch_size=32
    )
    return CLIPVisionModel(config)


def vace() -> WanVACEPipeline:
    """Return a pipeline with control frames and a mask, in an additional block for every other one."""
    control = 2 * LATENT_CHANNELS + VACE_MASK_CHANNELS
    transformer = WanVACETransformer3DModel(**SIZES, vace_layers=[0, 2], vace_in_channels=control)
    return weights.fill(WanVACEPipeline(**_common_parts(), transformer=transformer), seed=0)


def _common_parts() -> dict[str, Any]:
    tokenizer = tokenizers.t5()
    encoder = text_encoder(tokenizer)
    return {"tokenizer": tokenizer, "text_encoder": encoder, "vae": autoencoder(), "scheduler": scheduler()}
