"""Small FLUX.1-dev and FLUX.1-Kontext-dev with the classes of the real pipelines.

FLUX.1-dev has 8 heads of 16, trained weights, and 256 tokens for 128 x 128 pixels. FLUX.1-Kontext-dev has 24 heads of
8, random weights, and 64 tokens for 256 x 256 pixels. Its pipeline scales input images to about a million pixels, which
are 1024 tokens.
"""

from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
)

from small_models import tokenizers, weights
from small_models.parts import LATENT_CHANNELS, TEXT_WIDTH, autoencoder_kl, clip_encoder, t5_encoder


def transformer(heads: int = 8, rope: tuple[int, ...] = (0, 8, 8)) -> FluxTransformer2DModel:
    """Return a transformer of 2 double-stream and 4 single-stream blocks; by default about 2.3 million parameters.

    Args:
        heads: number of heads.
        rope: RoPE dims of a head for each axis. The first axis is constant in FLUX.1, so it gets none; in Kontext it
            distinguishes the input image from the generated one.
    """
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * LATENT_CHANNELS,  # patches of 2x2
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=sum(rope),
        num_attention_heads=heads,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        guidance_embeds=True,
        axes_dims_rope=rope,
    )


def autoencoder() -> AutoencoderKL:
    """Return an autoencoder with 4x downsampling and 4 latent channels."""
    return autoencoder_kl((16, 32, 64))


def kontext_transformer() -> FluxTransformer2DModel:
    """Return a transformer of 2 double-stream and 4 single-stream blocks with 24 heads."""
    return transformer(24, (4, 2, 2))


def _components(transformer: FluxTransformer2DModel, vae: AutoencoderKL) -> dict[str, Any]:
    clip, t5 = tokenizers.clip(), tokenizers.t5()
    return {
        "scheduler": FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        "vae": vae,
        "text_encoder": clip_encoder(clip),
        "tokenizer": clip,
        "text_encoder_2": t5_encoder(t5),
        "tokenizer_2": t5,
        "transformer": transformer,
    }


def pipeline(seed: int = 0) -> FluxPipeline:
    """Return an untrained pipeline, initialized from a seed."""
    torch.manual_seed(seed)
    return FluxPipeline(**_components(transformer(), autoencoder()))


def kontext(seed: int = 0) -> FluxKontextPipeline:
    """Return a Kontext pipeline with random weights from a seed; its autoencoder has 16x downsampling."""
    vae = autoencoder_kl((8, 8, 16, 32, 64), sample_size=1024)
    return weights.fill(FluxKontextPipeline(**_components(kontext_transformer(), vae)), seed)
