"""Small HunyuanVideo 1.5: the real classes, 8 heads of 16, random weights, 192 tokens for 9 frames of 128 x 128 px."""

from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from transformers import (
    ByT5Tokenizer,
    PreTrainedTokenizerBase,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
)

from small_models import tokenizers, weights
from small_models.parts import TEXT_WIDTH, decoder_sizes, qwen_tokens, t5_encoder

LATENT_CHANNELS = 8
# The pipeline drops the tokens of its system message, 108 with the real tokenizer. The template below has as many.
SYSTEM_TOKENS = 108
CHAT_TEMPLATE = (
    """
{%- for message in messages -%}
{%- if message.role == "system" -%}{{ "<|im_start|>" * SYSTEM_TOKENS }}
{%- else -%}{{ message.content }}<|im_end|>{%- endif -%}
{%- endfor -%}
""".strip()
).replace("SYSTEM_TOKENS", str(SYSTEM_TOKENS))


def transformer() -> HunyuanVideo15Transformer3DModel:
    """Return a transformer of 2 double-stream blocks.

    Its input channels are the latents, the latents of a first frame, and a mask of that frame.
    """
    return HunyuanVideo15Transformer3DModel(
        in_channels=2 * LATENT_CHANNELS + 1,
        out_channels=LATENT_CHANNELS,
        num_attention_heads=8,
        attention_head_dim=16,
        num_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        text_embed_dim=TEXT_WIDTH,
        text_embed_2_dim=TEXT_WIDTH,
        image_embed_dim=TEXT_WIDTH,
        rope_axes_dim=(4, 6, 6),
        target_size=128,
        task_type="t2v",
    )


def autoencoder() -> AutoencoderKLHunyuanVideo15:
    """Return an autoencoder with 16x downsampling in space, 4x in time, and 8 latent channels."""
    return AutoencoderKLHunyuanVideo15(
        latent_channels=LATENT_CHANNELS,
        block_out_channels=(16, 16, 32, 32, 32),
        layers_per_block=1,
        scaling_factor=1.0,
    )


def text_encoder(tokenizer: PreTrainedTokenizerBase) -> Qwen2_5_VLTextModel:
    """Return a Qwen 2.5-VL text model of 4 layers and width 64 for `tokenizer`; the last two layers are not used."""
    rope = dict(rope_type="default", rope_theta=1e6, mrope_section=[2, 3, 3])
    sizes = decoder_sizes(tokenizer, TEXT_WIDTH, layers=4)
    return Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(**sizes, rope_parameters=rope, **qwen_tokens(tokenizer)))


def pipeline(seed: int = 0) -> HunyuanVideo15Pipeline:
    """Return a text-to-video pipeline with random weights from a seed."""
    tokenizer, byte_tokenizer = tokenizers.qwen2(CHAT_TEMPLATE), ByT5Tokenizer()
    pipe = HunyuanVideo15Pipeline(
        text_encoder=text_encoder(tokenizer),
        tokenizer=tokenizer,
        transformer=transformer(),
        vae=autoencoder(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=t5_encoder(byte_tokenizer),  # encodes only quoted text of the prompt
        tokenizer_2=byte_tokenizer,
        guider=ClassifierFreeGuidance(guidance_scale=6.0),
    )
    return weights.fill(pipe, seed)
