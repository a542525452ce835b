"""A small FLUX.1-Kontext-dev: the real classes with 24 heads of 8, random weights, 256 x 256 pixels as 64 tokens.

The pipeline scales every input image to about a million pixels: the autoencoder packs those into 1024 tokens.
"""

from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxKontextPipeline, FluxTransformer2DModel

from xfuser_cocodiff.models import flux1, tokenizers, weights


def transformer() -> FluxTransformer2DModel:
    """2 double and 4 single blocks; its first axis tells the input image from the one that is made."""
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * flux1.LATENT_CHANNELS,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=8,
        num_attention_heads=24,
        joint_attention_dim=flux1.TEXT_WIDTH,
        pooled_projection_dim=flux1.TEXT_WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(4, 2, 2),
    )


def autoencoder() -> AutoencoderKL:
    """16 x downsampling to 4 channels."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 5,
        up_block_types=("UpDecoderBlock2D",) * 5,
        block_out_channels=(8, 8, 16, 32, 64),
        layers_per_block=1,
        latent_channels=flux1.LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=1024,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )


def pipeline(seed: int = 0) -> FluxKontextPipeline:
    """The whole pipeline, with random weights from a seed."""
    clip, t5 = tokenizers.clip(), tokenizers.t5()
    pipe = FluxKontextPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=autoencoder(),
        text_encoder=flux1.clip_encoder(clip),
        tokenizer=clip,
        text_encoder_2=flux1.t5_encoder(t5),
        tokenizer_2=t5,
        transformer=transformer(),
    )
    return weights.fill(pipe, seed)
