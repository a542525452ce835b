"""Small Lumina-Image-2.0: the real classes, 24 heads of 8, random weights, 64 tokens for 128 x 128 pixels."""

from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, Lumina2Pipeline, Lumina2Transformer2DModel
from transformers import Gemma2Config, Gemma2Model, PreTrainedTokenizerBase

from small_models import tokenizers, weights
from small_models.parts import LATENT_CHANNELS, TEXT_WIDTH, autoencoder_kl, decoder_sizes

HEADS, HEAD_DIM = 24, 8


def transformer() -> Lumina2Transformer2DModel:
    """Return a transformer of an image refiner, a text refiner and 4 joint blocks; 3 heads share K and V."""
    return Lumina2Transformer2DModel(
        sample_size=16,
        in_channels=LATENT_CHANNELS,
        hidden_size=HEADS * HEAD_DIM,
        num_layers=4,
        num_refiner_layers=1,
        num_attention_heads=HEADS,
        num_kv_heads=HEADS // 3,
        multiple_of=32,
        axes_dim_rope=(4, 2, 2),
        cap_feat_dim=TEXT_WIDTH,
    )


def autoencoder() -> AutoencoderKL:
    """Return an autoencoder with 8x downsampling, which the pipeline assumes, and 4 latent channels."""
    return autoencoder_kl((16, 16, 32, 64))


def text_encoder(tokenizer: PreTrainedTokenizerBase) -> Gemma2Model:
    """Return a Gemma 2 of 3 layers and width 64 for `tokenizer`; the prompt skips the last layer."""
    special_tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), tokenizer.pad_token_id)
    sizes = decoder_sizes(tokenizer, TEXT_WIDTH, layers=3)
    return Gemma2Model(Gemma2Config(**sizes, head_dim=16, query_pre_attn_scalar=16, **special_tokens))


def pipeline(seed: int = 0) -> Lumina2Pipeline:
    """Return a pipeline with random weights from a seed, and a Qwen2Tokenizer in place of Gemma's."""
    tokenizer = tokenizers.qwen2()
    pipe = Lumina2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=autoencoder(),
        text_encoder=text_encoder(tokenizer),
        tokenizer=tokenizer,
        transformer=transformer(),
    )
    return weights.fill(pipe, seed)
