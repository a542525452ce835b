"""A small Qwen-Image: the real classes with 24 heads of 8, random weights, 128 x 128 pixels as 256 tokens."""

from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from transformers import PreTrainedTokenizerBase, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from xfuser_cocodiff.models import tokenizers, weights

TEXT_WIDTH = 64
LATENT_CHANNELS = 8


def transformer() -> QwenImageTransformer2DModel:
    """4 double blocks."""
    return QwenImageTransformer2DModel(
        in_channels=4 * LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=4,
        attention_head_dim=8,
        num_attention_heads=24,
        joint_attention_dim=TEXT_WIDTH,
        axes_dims_rope=(4, 2, 2),
    )


def autoencoder() -> AutoencoderKLQwenImage:
    """4 x downsampling to 8 channels."""
    return AutoencoderKLQwenImage(
        base_dim=16,
        z_dim=LATENT_CHANNELS,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.0] * LATENT_CHANNELS,
        latents_std=[1.0] * LATENT_CHANNELS,
    )


def text_encoder(tokenizer: PreTrainedTokenizerBase) -> Qwen2_5_VLForConditionalGeneration:
    """A two-layer Qwen 2.5-VL over `tokenizer`, 64 wide; its vision tower is there but never runs."""
    text = dict(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=4 * TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rope_parameters=dict(rope_type="default", rope_theta=1e6, mrope_section=[2, 3, 3]),
        bos_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
    )
    vision = dict(
        depth=1,
        hidden_size=32,
        intermediate_size=64,
        num_heads=2,
        out_hidden_size=TEXT_WIDTH,
        fullatt_block_indexes=[0],
    )
    tokens = dict(vision_start="vision_start", vision_end="vision_end", image="image_pad", video="video_pad")
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{mark}|>") for name, mark in tokens.items()}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids))


def pipeline(seed: int = 0) -> QwenImagePipeline:
    """The whole pipeline, with random weights from a seed."""
    tokenizer = tokenizers.qwen2()
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02
    )
    pipe = QwenImagePipeline(
        scheduler=scheduler,
        vae=autoencoder(),
        text_encoder=text_encoder(tokenizer),
        tokenizer=tokenizer,
        transformer=transformer(),
    )
    return weights.fill(pipe, seed)
