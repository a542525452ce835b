"""Small Wan 2.2 A14B: the real classes, 24 heads of 8, random weights, 192 tokens for 9 frames of 128 x 128 px."""

from typing import Any

from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from transformers import PreTrainedTokenizerBase, UMT5Config, UMT5EncoderModel

from small_models import tokenizers, weights
from small_models.parts import LATENT_CHANNELS, TEXT_WIDTH, t5_sizes

SIZES: dict[str, Any] = {
    "num_attention_heads": 24,
    "attention_head_dim": 8,
    "in_channels": LATENT_CHANNELS,
    "out_channels": LATENT_CHANNELS,
    "text_dim": TEXT_WIDTH,
    "ffn_dim": 384,
    "num_layers": 4,
}
"""Dimensions of the transformers."""


def transformer() -> WanTransformer3DModel:
    """Return a transformer of 4 blocks."""
    return WanTransformer3DModel(**SIZES)


def scheduler() -> UniPCMultistepScheduler:
    """Return the scheduler of all Wan models."""
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def autoencoder(channels: int = LATENT_CHANNELS, **more: Any) -> AutoencoderKLWan:
    """Return an autoencoder with 8x downsampling in space and 4x in time."""
    mean, std = [0.0] * channels, [1.0] * channels
    return AutoencoderKLWan(base_dim=8, z_dim=channels, num_res_blocks=1, latents_mean=mean, latents_std=std, **more)


def text_encoder(tokenizer: PreTrainedTokenizerBase) -> UMT5EncoderModel:
    """Return a UMT5 encoder of 2 layers and width 64 for `tokenizer`."""
    return UMT5EncoderModel(UMT5Config(**t5_sizes(tokenizer)))


def pipeline(seed: int = 0) -> WanPipeline:
    """Return a pipeline of two experts with random weights from a seed."""
    tokenizer = tokenizers.t5()
    pipe = WanPipeline(
        tokenizer=tokenizer,
        text_encoder=text_encoder(tokenizer),
        vae=autoencoder(),
        scheduler=scheduler(),
        transformer=transformer(),
        transformer_2=transformer(),
        # Noise level below which the second expert takes over.
        boundary_ratio=0.875,
    )
    return weights.fill(pipe, seed)
