"""Small Stable Diffusion 3.5: the real classes, 8 heads of 16, trained weights, 256 tokens for 128 x 128 pixels."""

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from transformers import CLIPTextModelWithProjection, PreTrainedTokenizerBase

from small_models import flux1, parts, tokenizers

HEADS, HEAD_DIM = 8, 16
# The two CLIP encoders together are as wide as T5; the pipeline would pad the narrower of the two.
TEXT_WIDTH = 2 * parts.TEXT_WIDTH


def transformer() -> SD3Transformer2DModel:
    """Return a transformer of 6 joint blocks, about 3.5 million parameters; the last block discards its text."""
    return SD3Transformer2DModel(
        sample_size=32,
        in_channels=parts.LATENT_CHANNELS,
        out_channels=parts.LATENT_CHANNELS,
        num_layers=6,
        attention_head_dim=HEAD_DIM,
        num_attention_heads=HEADS,
        joint_attention_dim=TEXT_WIDTH,
        caption_projection_dim=HEADS * HEAD_DIM,
        pooled_projection_dim=TEXT_WIDTH,
        pos_embed_max_size=64,
        qk_norm="rms_norm",
    )


def clip_encoder(tokenizer: PreTrainedTokenizerBase) -> CLIPTextModelWithProjection:
    """Return a CLIP text encoder of 2 layers and width 64, with a projection."""
    return CLIPTextModelWithProjection(parts.clip_config(tokenizer))


def pipeline(seed: int = 0) -> StableDiffusion3Pipeline:
    """Return an untrained pipeline, initialized from a seed."""
    torch.manual_seed(seed)
    clip, t5 = tokenizers.clip(), tokenizers.t5()
    return StableDiffusion3Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=flux1.autoencoder(),
        text_encoder=clip_encoder(clip),
        tokenizer=clip,
        text_encoder_2=clip_encoder(clip),
        tokenizer_2=clip,
        text_encoder_3=parts.t5_encoder(t5, TEXT_WIDTH),
        tokenizer_3=t5,
        transformer=transformer(),
    )
