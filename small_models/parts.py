"""Provides components that several small models share."""

from collections.abc import Sequence
from typing import Any

from diffusers import AutoencoderKL
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerBase, T5Config, T5EncoderModel

TEXT_WIDTH = 64
LATENT_CHANNELS = 4


def autoencoder_kl(widths: Sequence[int], sample_size: int = 128) -> AutoencoderKL:
    """Return an AutoencoderKL with 4 latent channels, which halves the image between successive widths.

    It has no attention, so that it can be trained on crops.
    """
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * len(widths),
        up_block_types=("UpDecoderBlock2D",) * len(widths),
        block_out_channels=tuple(widths),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=sample_size,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )


def clip_config(tokenizer: PreTrainedTokenizerBase) -> CLIPTextConfig:
    """Return the configuration of a CLIP text encoder of 2 layers and width 64 for `tokenizer`."""
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=4 * TEXT_WIDTH,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def clip_encoder(tokenizer: PreTrainedTokenizerBase) -> CLIPTextModel:
    """Return a CLIP text encoder of 2 layers and width 64 for `tokenizer`."""
    return CLIPTextModel(clip_config(tokenizer))


def t5_sizes(tokenizer: PreTrainedTokenizerBase, width: int = TEXT_WIDTH) -> dict[str, Any]:
    """Return configuration values of a T5 or UMT5 encoder of 2 layers for `tokenizer`."""
    heads = {"d_model": width, "d_kv": 16, "num_heads": width // 16}
    return {"vocab_size": len(tokenizer), **heads, "d_ff": 256, "num_layers": 2, "feed_forward_proj": "gated-gelu"}


def t5_encoder(tokenizer: PreTrainedTokenizerBase, width: int = TEXT_WIDTH) -> T5EncoderModel:
    """Return a T5 encoder of 2 layers for `tokenizer`."""
    return T5EncoderModel(T5Config(**t5_sizes(tokenizer, width)))


def decoder_sizes(tokenizer: PreTrainedTokenizerBase, width: int, layers: int) -> dict[str, Any]:
    """Return configuration values of a language model that encodes prompts of `tokenizer`."""
    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": layers}
    return {"vocab_size": len(tokenizer), **sizes, "num_attention_heads": 4, "num_key_value_heads": 2}


def qwen_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """Return the ids of the first and the last token for language models of Qwen."""
    tokens = {"bos_token_id": "<|endoftext|>", "eos_token_id": "<|im_end|>"}
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}
