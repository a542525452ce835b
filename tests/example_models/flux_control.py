"""A small FLUX.1 with control: FLUX.1-dev's parts around a transformer that is given another picture's latents too."""

from diffusers import FlowMatchEulerDiscreteScheduler, FluxControlPipeline, FluxTransformer2DModel

from xfuser_cocodiff.models import flux1, tokenizers, weights


def transformer() -> FluxTransformer2DModel:
    """FLUX.1's small one with twice its input."""
    sizes = {name: value for name, value in flux1.transformer().config.items() if not name.startswith("_")}
    channels = 4 * flux1.LATENT_CHANNELS
    return FluxTransformer2DModel(**{**sizes, "in_channels": 2 * channels, "out_channels": channels})


def pipeline() -> FluxControlPipeline:
    """The whole pipeline."""
    clip, t5 = tokenizers.clip(), tokenizers.t5()
    pipe = FluxControlPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=flux1.autoencoder(),
        text_encoder=flux1.clip_encoder(clip),
        tokenizer=clip,
        text_encoder_2=flux1.t5_encoder(t5),
        tokenizer_2=t5,
        transformer=transformer(),
    )
    return weights.fill(pipe, seed=0)
