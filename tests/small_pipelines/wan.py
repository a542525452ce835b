"""Wan's pipelines from pictures: 9 frames of 128 x 128 as 192 tokens, with 24 heads of 8."""

from typing import Any

from diffusers import (
    WanImageToVideoPipeline,
    WanTransformer3DModel,
    WanVACEPipeline,
    WanVACETransformer3DModel,
)
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel

from xfuser_cocodiff.lab.models import tokenizers, weights
from xfuser_cocodiff.lab.models.wan import LATENT_CHANNELS, SIZES, autoencoder, scheduler, text_encoder

SEEN_WIDTH = 32
MASK_CHANNELS, VACE_MASK_CHANNELS = 4, 64
"""For each latent frame one of its 4 frames; for each latent pixel one of its 8 x 8."""


def image_to_video(experts: int = 1, sees: bool = False, expands: bool = False) -> WanImageToVideoPipeline:
    """From a first frame.

    Args:
        experts: transformers, of which each has a share of the steps.
        sees: whether an image encoder sees the frame too, as in 2.1.
        expands: whether each token has a timestep of its own and the frame is one of the latents, as in 2.2's TI2V.
    """
    sizes: dict[str, Any] = dict(SIZES) if expands else {**SIZES, "in_channels": 2 * LATENT_CHANNELS + MASK_CHANNELS}
    if sees:
        sizes |= {
            "image_dim": SEEN_WIDTH,
            "added_kv_proj_dim": SIZES["num_attention_heads"] * SIZES["attention_head_dim"],
        }
    pipe = WanImageToVideoPipeline(
        **_alike(),
        image_encoder=image_encoder() if sees else None,
        image_processor=CLIPImageProcessorPil() if sees else None,
        transformer=WanTransformer3DModel(**sizes),
        transformer_2=WanTransformer3DModel(**sizes) if experts == 2 else None,
        boundary_ratio=0.9 if experts == 2 else None,
        expand_timesteps=expands,
    )
    return weights.fill(pipe, seed=0)


def image_encoder() -> CLIPVisionModel:
    """A two-layer CLIP that sees 224 x 224 pixels as 49 patches and one token for all."""
    config = CLIPVisionConfig(
        hidden_size=SEEN_WIDTH, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, patch_size=32
    )
    return CLIPVisionModel(config)


def vace() -> WanVACEPipeline:
    """From frames and a mask, which a block beside every other one sees."""
    control = 2 * LATENT_CHANNELS + VACE_MASK_CHANNELS
    transformer = WanVACETransformer3DModel(**SIZES, vace_layers=[0, 2], vace_in_channels=control)
    return weights.fill(WanVACEPipeline(**_alike(), transformer=transformer), seed=0)


def _alike() -> dict[str, Any]:
    tokenizer = tokenizers.t5()
    encoder = text_encoder(tokenizer)
    return {"tokenizer": tokenizer, "text_encoder": encoder, "vae": autoencoder(), "scheduler": scheduler()}
