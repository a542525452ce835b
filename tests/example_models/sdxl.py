"""A small Stable Diffusion XL, whose UNet exchanges nothing."""

from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel

from xfuser_cocodiff.models import flux1, lumina2, sd35, tokenizers, weights


def unet() -> UNet2DConditionModel:
    """2 levels, the second with attention."""
    return UNet2DConditionModel(
        sample_size=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(32, 64),
        layers_per_block=1,
        attention_head_dim=8,
        norm_num_groups=8,
        use_linear_projection=True,
        cross_attention_dim=2 * flux1.TEXT_WIDTH,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + flux1.TEXT_WIDTH,
    )


def autoencoder() -> AutoencoderKL:
    """Lumina 2's, with the convolution before its decoder that the pipeline asks for the dtype."""
    return AutoencoderKL.from_config(lumina2.autoencoder().config, use_post_quant_conv=True, force_upcast=False)


def pipeline() -> StableDiffusionXLPipeline:
    """The whole pipeline."""
    clip = tokenizers.clip()
    pipe = StableDiffusionXLPipeline(
        vae=autoencoder(),
        text_encoder=flux1.clip_encoder(clip),
        text_encoder_2=sd35.clip_encoder(clip),
        tokenizer=clip,
        tokenizer_2=clip,
        unet=unet(),
        scheduler=EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"),
    )
    return weights.fill(pipe, seed=0)
