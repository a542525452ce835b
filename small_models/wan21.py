"""Small Wan 2.1, text to video: the real classes, 8 heads of 32, trained weights, 9 frames of 128 x 128 px."""

import torch
from diffusers import WanPipeline, WanTransformer3DModel

from small_models import captions, tokenizers, wan
from small_models.parts import TEXT_WIDTH

LATENT_CHANNELS = 8


def transformer() -> WanTransformer3DModel:
    """Return a transformer of 5 blocks and about 5.2 million parameters, for 192 tokens."""
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
    """Return an untrained pipeline, initialized from a seed."""
    torch.manual_seed(seed)
    tokenizer = tokenizers.t5([*captions.CORPUS, *captions.VIDEO_CORPUS])
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=wan.text_encoder(tokenizer),
        vae=wan.autoencoder(
            LATENT_CHANNELS, dim_mult=[1, 2, 4, 6]
        ),  # wider at low resolution, where it costs little time
        scheduler=wan.scheduler(),
        transformer=transformer(),
    )
