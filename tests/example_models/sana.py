"""Small Sana and Sana-Sprint: 8 heads of 16; pictures are made of 1024 x 1024 pixels, 1024 tokens, and then resized."""

from diffusers import (
    AutoencoderDC,
    FlowMatchEulerDiscreteScheduler,
    SanaPipeline,
    SanaSprintPipeline,
    SanaTransformer2DModel,
    SCMScheduler,
)

from xfuser_cocodiff.models import lumina2, tokenizers, weights

LATENT_CHANNELS = 4
CHANNELS = (8, 8, 8, 16, 16, 32)


def transformer(**more: object) -> SanaTransformer2DModel:
    """2 blocks; 32 x 32 latents are what both pipelines take for 1024 x 1024 pixels."""
    return SanaTransformer2DModel(
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=8,
        attention_head_dim=16,
        num_layers=2,
        num_cross_attention_heads=8,
        cross_attention_head_dim=16,
        cross_attention_dim=128,
        caption_channels=lumina2.TEXT_WIDTH,
        sample_size=32,
        patch_size=1,
        **more,
    )


def autoencoder() -> AutoencoderDC:
    """32 x downsampling to 4 channels."""
    return AutoencoderDC(
        latent_channels=LATENT_CHANNELS,
        encoder_block_out_channels=CHANNELS,
        decoder_block_out_channels=CHANNELS,
        encoder_layers_per_block=(1,) * 6,
        decoder_layers_per_block=(1,) * 6,
        encoder_qkv_multiscales=((),) * 6,
        decoder_qkv_multiscales=((),) * 6,
    )


def pipeline() -> SanaPipeline:
    """The whole pipeline, with a Qwen2Tokenizer for Gemma's."""
    tokenizer = tokenizers.qwen2()
    pipe = SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=lumina2.text_encoder(tokenizer),
        vae=autoencoder(),
        transformer=transformer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )
    return weights.fill(pipe, seed=0)


def sprint() -> SanaSprintPipeline:
    """Sana-Sprint, which is told the guidance."""
    tokenizer = tokenizers.qwen2()
    pipe = SanaSprintPipeline(
        tokenizer=tokenizer,
        text_encoder=lumina2.text_encoder(tokenizer),
        vae=autoencoder(),
        transformer=transformer(guidance_embeds=True, qk_norm="rms_norm_across_heads"),
        scheduler=SCMScheduler(),
    )
    return weights.fill(pipe, seed=0)
