"""A small FLUX.1-dev: the real classes with 8 heads of 16, trained weights, 128 x 128 pixels as 256 tokens.

And a small FLUX.1-Kontext-dev: 24 heads of 8, random weights, 256 x 256 pixels as 64 tokens. Its pipeline scales every
input image to about a million pixels, which the autoencoder packs into 1024 tokens.
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

from xfuser_cocodiff.lab.models import tokenizers, weights
from xfuser_cocodiff.lab.models.parts import LATENT_CHANNELS, TEXT_WIDTH, autoencoder_kl, clip_encoder, t5_encoder


def transformer(heads: int = 8, rope: tuple[int, ...] = (0, 8, 8)) -> FluxTransformer2DModel:
    """2 double and 4 single blocks; about 2.3 million parameters.

    Args:
        heads: how many.
        rope: dims of a head for each axis. FLUX.1 gives every token 0 on the first axis, so the dims go to rows and
            columns; Kontext's first axis tells the input image from the one that is made.
    """
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * LATENT_CHANNELS,  # patches of 2 x 2
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
    """4 x downsampling to 4 channels."""
    return autoencoder_kl((16, 32, 64))


def kontext_transformer() -> FluxTransformer2DModel:
    """2 double and 4 single blocks of 24 heads."""
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
    """The whole pipeline, untrained, from a seed."""
    torch.manual_seed(seed)
    return FluxPipeline(**_components(transformer(), autoencoder()))


def kontext(seed: int = 0) -> FluxKontextPipeline:
    """The whole pipeline of Kontext, with random weights from a seed; 16 x downsampling."""
    vae = autoencoder_kl((8, 8, 16, 32, 64), sample_size=1024)
    return weights.fill(FluxKontextPipeline(**_components(kontext_transformer(), vae)), seed)
