"""A small Qwen-Image-Edit: the real classes with 24 heads of 8, random weights, 256 x 256 pixels as 64 tokens.

The pipeline scales every input image to about a million pixels: the autoencoder packs those into 1024 tokens.
"""

from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageEditPipeline
from transformers import PaddleOCRVLProcessor, PreTrainedTokenizerBase, Qwen2VLImageProcessorPil

from xfuser_cocodiff.models import qwen_image, tokenizers, weights

# What the text encoder sees of the input image: patches of 14 pixels, four of them a token, so many tokens.
TOKENS_SEEN = 16


def autoencoder() -> AutoencoderKLQwenImage:
    """16 x downsampling to 8 channels."""
    return AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=qwen_image.LATENT_CHANNELS,
        dim_mult=[1, 1, 2, 4, 4],
        num_res_blocks=1,
        temperal_downsample=[False, False, True, True],
        latents_mean=[0.0] * qwen_image.LATENT_CHANNELS,
        latents_std=[1.0] * qwen_image.LATENT_CHANNELS,
    )


def processor(tokenizer: PreTrainedTokenizerBase) -> PaddleOCRVLProcessor:
    """What reads text and image.

    The real one, a Qwen2VLProcessor, needs torchvision for videos that never come in. This one is the same without.
    """
    pixels = {"shortest_edge": 28**2, "longest_edge": 28**2 * TOKENS_SEEN}
    return PaddleOCRVLProcessor(image_processor=Qwen2VLImageProcessorPil(size=pixels), tokenizer=tokenizer)


def pipeline(seed: int = 0) -> QwenImageEditPipeline:
    """The whole pipeline, with random weights from a seed."""
    tokenizer = tokenizers.qwen2(image_token="<|image_pad|>")
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
    )
    pipe = QwenImageEditPipeline(
        scheduler=scheduler,
        vae=autoencoder(),
        text_encoder=qwen_image.text_encoder(tokenizer),
        tokenizer=tokenizer,
        processor=processor(tokenizer),
        transformer=qwen_image.transformer(),
    )
    return weights.fill(pipe, seed)
