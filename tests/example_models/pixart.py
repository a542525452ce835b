"""Small PixArt-Alpha and -Sigma: 8 heads of 24, 128 x 128 pixels as 64 tokens."""

from diffusers import (
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    PixArtAlphaPipeline,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
)

from xfuser_cocodiff.models import flux1, lumina2, tokenizers, weights


def transformer(sample_size: int) -> PixArtTransformer2DModel:
    """2 blocks that predict the variance too; one for samples of 128 is told the size of the picture."""
    return PixArtTransformer2DModel(
        num_attention_heads=8,
        attention_head_dim=24,
        num_layers=2,
        sample_size=sample_size,
        patch_size=2,
        in_channels=lumina2.LATENT_CHANNELS,
        out_channels=2 * lumina2.LATENT_CHANNELS,
        caption_channels=flux1.TEXT_WIDTH,
        cross_attention_dim=192,
    )


def pipeline(kind: type[DiffusionPipeline], sample_size: int) -> DiffusionPipeline:
    """The whole pipeline, of either kind."""
    t5 = tokenizers.t5()
    pipe = kind(
        tokenizer=t5,
        text_encoder=flux1.t5_encoder(t5),
        vae=lumina2.autoencoder(),
        transformer=transformer(sample_size),
        scheduler=DPMSolverMultistepScheduler(),
    )
    return weights.fill(pipe, seed=0)


def alpha() -> DiffusionPipeline:
    """As that for 1024 pixels, which is told their number."""
    return pipeline(PixArtAlphaPipeline, 128)


def sigma() -> DiffusionPipeline:
    """Of samples that are told nothing."""
    return pipeline(PixArtSigmaPipeline, 16)
