"""Small Qwen-Image and Qwen-Image-Edit: the real classes, 24 heads of 8, random weights.

Qwen-Image has 256 tokens for 128 x 128 pixels, Qwen-Image-Edit 64 tokens for 256 x 256 pixels. The pipeline of the
latter scales input images to about a million pixels, which are 1024 tokens.
"""

from collections.abc import Sequence
from typing import Any

from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import (
    PaddleOCRVLProcessor,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
)

from small_models import tokenizers, weights
from small_models.parts import TEXT_WIDTH, decoder_sizes, qwen_tokens

LATENT_CHANNELS = 8
# Tokens of the input image in Edit's text encoder; a token is four patches of 14 x 14 pixels.
VISION_TOKENS = 16


def transformer() -> QwenImageTransformer2DModel:
    """Return a transformer of 4 double-stream blocks."""
    return QwenImageTransformer2DModel(
        in_channels=4 * LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=24,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(4, 2, 2),
    )


def autoencoder(base: int = 16, widths: Sequence[int] = (1, 2, 4)) -> AutoencoderKLQwenImage:
    """Return an autoencoder with 8 latent channels.

    Args:
        base: unit of the widths.
        widths: widths of the levels in units of `base`. Every further level halves the image, and half of them time.
    """
    return AutoencoderKLQwenImage(
        base_dim=base,
        z_dim=LATENT_CHANNELS,
        dim_mult=[*widths],
        num_res_blocks=1,
        temperal_downsample=[level >= len(widths) // 2 for level in range(len(widths) - 1)],
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
    )


def text_encoder(tokenizer: PreTrainedTokenizerBase) -> Qwen2_5_VLForConditionalGeneration:
    """Return a Qwen 2.5-VL of 2 layers and width 64 for `tokenizer`; Qwen-Image never runs its vision tower."""
    rope = dict(rope_type="default", rope_theta=1e6, mrope_section=[2, 3, 3])
    sizes = decoder_sizes(tokenizer, TEXT_WIDTH, layers=2)
    text = dict(**sizes, rope_parameters=rope, **qwen_tokens(tokenizer))
    vision = dict(
        depth=1,
        hidden_size=32,
        intermediate_size=64,
        num_heads=2,
        out_hidden_size=TEXT_WIDTH,
        fullatt_block_indexes=[0],
    )
    tokens = dict(vision_start="vision_start", vision_end="vision_end", image="image_pad", video="video_pad")
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in tokens.items()}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids))


def processor(tokenizer: PreTrainedTokenizerBase) -> PaddleOCRVLProcessor:
    """Return the processor of text and images for Qwen-Image-Edit.

    The real one, a Qwen2VLProcessor, requires torchvision for videos. This one gives the same results without it.
    """
    pixels = {"shortest_edge": 28**2, "longest_edge": 28**2 * VISION_TOKENS}
    return PaddleOCRVLProcessor(image_processor=Qwen2VLImageProcessorPil(size=pixels), tokenizer=tokenizer)


def _components(tokenizer: PreTrainedTokenizerBase, vae: AutoencoderKLQwenImage) -> dict[str, Any]:
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
    )
    parts = {"text_encoder": text_encoder(tokenizer), "tokenizer": tokenizer, "transformer": transformer()}
    return {"scheduler": scheduler, "vae": vae, **parts}


def pipeline(seed: int = 0) -> QwenImagePipeline:
    """Return a pipeline with random weights from a seed; its autoencoder has 4x downsampling."""
    return weights.fill(QwenImagePipeline(**_components(tokenizers.qwen2(), autoencoder())), seed)


def edit(seed: int = 0) -> QwenImageEditPipeline:
    """Return a Qwen-Image-Edit pipeline with random weights from a seed; its autoencoder has 16x downsampling."""
    tokenizer = tokenizers.qwen2(image_token="<|image_pad|>")
    parts = _components(tokenizer, autoencoder(8, (1, 1, 2, 4, 4)))
    return weights.fill(QwenImageEditPipeline(**parts, processor=processor(tokenizer)), seed)
