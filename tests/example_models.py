"""Small pipelines with random weights for xDiT's example scripts, of models that its runner does not have.

By default transformers have 8 heads of 16, and pictures 128 x 128 pixels.
"""

from collections.abc import Callable

from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    AutoencoderKLCogVideoX,
    CogVideoXDDIMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    DDPMScheduler,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxControlPipeline,
    FluxTransformer2DModel,
    HunyuanDiT2DModel,
    HunyuanDiTPipeline,
    PixArtAlphaPipeline,
    PixArtSigmaPipeline,
    PixArtTransformer2DModel,
    SanaPipeline,
    SanaSprintPipeline,
    SanaTransformer2DModel,
    SCMScheduler,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import BertConfig, BertModel, BertTokenizer

from models import captions, flux1, lumina2, sd35, tokenizers, weights
from tests.sizes import build


def whole(kind: type[DiffusionPipeline], **parts: object) -> DiffusionPipeline:
    """Return a pipeline with random weights."""
    return weights.fill(kind(**parts), seed=0)


def t5(suffix: str = "") -> dict[str, object]:
    """Return a T5 tokenizer and encoder as parts of a pipeline, with a suffix to their names."""
    tokenizer = tokenizers.t5()
    return {f"tokenizer{suffix}": tokenizer, f"text_encoder{suffix}": flux1.t5_encoder(tokenizer)}


def clip(encoder: Callable = flux1.clip_encoder, suffix: str = "") -> dict[str, object]:
    """Return a CLIP tokenizer and encoder as parts of a pipeline, with a suffix to their names."""
    tokenizer = tokenizers.clip()
    return {f"tokenizer{suffix}": tokenizer, f"text_encoder{suffix}": encoder(tokenizer)}


def cogvideox() -> DiffusionPipeline:
    """Return CogVideoX with 9 frames, as 192 tokens."""
    transformer = build(
        CogVideoXTransformer3DModel,
        time_embed_dim=16,
        text_embed_dim=flux1.TEXT_WIDTH,
        sample_width=16,
        sample_height=16,
        sample_frames=9,
        use_rotary_positional_embeddings=True,
    )
    vae = AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 16, 16),
        latent_channels=transformer.config.in_channels,
        layers_per_block=1,
        norm_num_groups=8,
        sample_height=128,
        sample_width=128,
        scaling_factor=1.0,
    )
    scheduler = CogVideoXDDIMScheduler(prediction_type="v_prediction")
    return whole(CogVideoXPipeline, **t5(), vae=vae, transformer=transformer, scheduler=scheduler)


def flux_control() -> DiffusionPipeline:
    """Return FLUX.1 with a control picture in additional channels."""
    sizes = {name: value for name, value in flux1.transformer().config.items() if not name.startswith("_")}
    channels = 4 * flux1.LATENT_CHANNELS
    return whole(
        FluxControlPipeline,
        **clip(),
        **t5("_2"),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=flux1.autoencoder(),
        transformer=FluxTransformer2DModel(**{**sizes, "in_channels": 2 * channels, "out_channels": channels}),
    )


def hunyuandit() -> DiffusionPipeline:
    """Return HunyuanDiT: 64 tokens, 4 blocks with skip connections, 77 tokens of BERT, 256 of T5, no safety checker."""
    words = sorted({word.lower() for line in captions.CORPUS for word in line.split()})
    letters = [chr(code) for code in range(33, 127)]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters), *words]
    bert = BertTokenizer(vocab={piece: place for place, piece in enumerate(dict.fromkeys(pieces))}, model_max_length=77)
    width = flux1.TEXT_WIDTH
    encoder = BertConfig(
        vocab_size=len(bert), hidden_size=width, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    transformer = build(
        HunyuanDiT2DModel,
        in_channels=lumina2.LATENT_CHANNELS,
        patch_size=2,
        hidden_size=128,
        num_layers=4,
        cross_attention_dim=width,
        cross_attention_dim_t5=width,
        pooled_projection_dim=64,
        text_len=77,
        text_len_t5=256,
    )
    return whole(
        HunyuanDiTPipeline,
        **t5("_2"),
        vae=lumina2.autoencoder(),
        text_encoder=BertModel(encoder),
        tokenizer=bert,
        transformer=transformer,
        scheduler=DDPMScheduler(beta_schedule="scaled_linear", prediction_type="v_prediction", beta_end=0.02),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def pixart_alpha(kind: type[DiffusionPipeline] = PixArtAlphaPipeline, sample_size: int = 128) -> DiffusionPipeline:
    """Return PixArt: 64 tokens, head dim 24, predicting noise and variance; for samples of 128, with the image size."""
    transformer = build(
        PixArtTransformer2DModel,
        attention_head_dim=24,
        sample_size=sample_size,
        in_channels=lumina2.LATENT_CHANNELS,
        out_channels=2 * lumina2.LATENT_CHANNELS,
        caption_channels=flux1.TEXT_WIDTH,
        cross_attention_dim=192,
    )
    return whole(
        kind, **t5(), vae=lumina2.autoencoder(), transformer=transformer, scheduler=DPMSolverMultistepScheduler()
    )


def pixart_sigma() -> DiffusionPipeline:
    """Return PixArt-Sigma, without the image size."""
    return pixart_alpha(PixArtSigmaPipeline, 16)


def sana() -> DiffusionPipeline:
    """Return Sana, whose pictures have 1024 x 1024 pixels, 1024 tokens, before they are resized."""
    return _sana(SanaPipeline, FlowMatchEulerDiscreteScheduler(shift=3.0), guidance_embeds=False)


def sana_sprint() -> DiffusionPipeline:
    """Return Sana Sprint, with embedded guidance."""
    return _sana(SanaSprintPipeline, SCMScheduler(), qk_norm="rms_norm_across_heads")


def _sana(kind: type[DiffusionPipeline], scheduler: object, **more: object) -> DiffusionPipeline:
    tokenizer = tokenizers.qwen2()  # in the place of Gemma's
    transformer = build(
        SanaTransformer2DModel,
        num_cross_attention_heads=8,
        cross_attention_head_dim=16,
        caption_channels=lumina2.TEXT_WIDTH,
        sample_size=32,  # both pipelines assume 1024 x 1024 pixels
        patch_size=1,
        **more,
    )
    sizes = {"block_out_channels": (8, 8, 8, 16, 16, 32), "layers_per_block": (1,) * 6, "qkv_multiscales": ((),) * 6}
    coders = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
    return whole(
        kind,
        tokenizer=tokenizer,
        text_encoder=lumina2.text_encoder(tokenizer),
        vae=AutoencoderDC(latent_channels=transformer.config.in_channels, **coders),
        transformer=transformer,
        scheduler=scheduler,
    )


def stable_diffusion_3() -> DiffusionPipeline:
    """Return Stable Diffusion 3.5 with random weights."""
    return weights.fill(sd35.pipeline(), seed=0)


def sdxl() -> DiffusionPipeline:
    """Return Stable Diffusion XL, whose UNet has no all-to-alls: 2 levels, the second with attention."""
    unet = UNet2DConditionModel(
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
    # Lumina 2's autoencoder, with the convolution from which the pipeline reads the dtype.
    vae = AutoencoderKL.from_config(lumina2.autoencoder().config, use_post_quant_conv=True, force_upcast=False)
    scheduler = EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    return whole(
        StableDiffusionXLPipeline, **clip(), **clip(sd35.clip_encoder, "_2"), vae=vae, unet=unet, scheduler=scheduler
    )
