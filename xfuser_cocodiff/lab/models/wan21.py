"""A small Wan 2.1, text to video: the real classes with 8 heads of 32, trained weights, 9 frames of 128 x 128."""

import torch
from diffusers import WanPipeline, WanTransformer3DModel

from xfuser_cocodiff.lab.models import captions, tokenizers, wan
from xfuser_cocodiff.lab.models.parts import TEXT_WIDTH

LATENT_CHANNELS = 8


def transformer() -> WanTransformer3DModel:
    """About 5.2 million parameters: 5 blocks, which see 192 tokens."""
    return WanTransformer3DModel(
        num_attention_heads=8,
        attention_head_dim=32,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        text_dim=TEXT_WIDTH,
        ffn_dim=768,
        num_layers=5,
    )


def pipeline(seed: int = 0) -> WanPipeline:
    """The whole pipeline, untrained, from a seed."""
    torch.manual_seed(seed)
    tokenizer = tokenizers.t5([*captions.CORPUS, *captions.VIDEO_CORPUS])
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=wan.text_encoder(tokenizer),
        vae=wan.autoencoder(LATENT_CHANNELS, dim_mult=[1, 2, 4, 6]),  # wide where that costs little time
        scheduler=wan.scheduler(),
        transformer=transformer(),
    )
