"""Small FLUX.2-dev and klein-4B: the real classes, 24 heads of 8, random weights, 256 tokens for 128 x 128 px."""

from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
)
from transformers import (
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from small_models import tokenizers, weights
from small_models.parts import decoder_sizes, qwen_tokens

TEXT_WIDTH = 32
# The pipelines stack hidden states 10, 20 and 30 of their text encoders; klein's stacks 9, 18 and 27.
TEXT_LAYERS, TEXT_STATES = 30, 3

# Contains the user's message only. FLUX.2's constant system message would fill a short max_sequence_length.
CHAT_TEMPLATE = """
{%- for message in messages if message.role == "user" -%}
{%- for part in message.content if part.type == "text" -%}<|im_start|>{{ part.text }}<|im_end|>{%- endfor -%}
{%- endfor -%}
""".strip()
# Qwen 3's template without tools and thinking.
KLEIN_CHAT_TEMPLATE = """
{%- for message in messages -%}
<|im_start|>{{ message.role }}{{ "\n" }}{{ message.content }}<|im_end|>{{ "\n" }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant{{ "\n" }}{%- endif -%}
""".strip()


def transformer(guided: bool = True) -> Flux2Transformer2DModel:
    """Return a transformer of 2 double-stream and 4 single-stream blocks.

    Args:
        guided: whether it has a guidance embedding; False if guidance is distilled into the weights.
    """
    return Flux2Transformer2DModel(
        in_channels=32,
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=8,
        num_attention_heads=24,
        joint_attention_dim=TEXT_STATES * TEXT_WIDTH,
        axes_dims_rope=(2, 2, 2, 2),
        guidance_embeds=guided,
    )


def autoencoder() -> AutoencoderKLFlux2:
    """Return an autoencoder with 4x downsampling and 8 latent channels."""
    return AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 64),
        layers_per_block=1,
        latent_channels=8,
        norm_num_groups=8,
        sample_size=128,
        mid_block_add_attention=False,
    )


def text_encoder(tokenizer: PreTrainedTokenizerBase) -> Mistral3ForConditionalGeneration:
    """Return a Mistral 3 of 30 layers and width 32 for `tokenizer`; its vision tower never runs."""
    sizes = decoder_sizes(tokenizer, TEXT_WIDTH, TEXT_LAYERS)
    text = dict(**sizes, model_type="mistral", head_dim=8, sliding_window=None)
    vision = dict(
        model_type="pixtral",
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=8,
        image_size=64,
        patch_size=16,
    )
    image_token = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    config = Mistral3Config(text_config=text, vision_config=vision, image_token_index=image_token)
    return Mistral3ForConditionalGeneration(config)


def pipeline(seed: int = 0) -> Flux2Pipeline:
    """Return a pipeline with random weights from a seed.

    The tokenizer is a Qwen2Tokenizer. The real one, a PixtralProcessor, requires torchvision even without images.
    """
    tokenizer = tokenizers.qwen2(CHAT_TEMPLATE)
    pipe = Flux2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=autoencoder(),
        text_encoder=text_encoder(tokenizer),
        tokenizer=tokenizer,
        transformer=transformer(),
    )
    return weights.fill(pipe, seed)


def klein_text_encoder(tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    """Return a Qwen 3 of 30 layers and width 32 for `tokenizer`."""
    sizes = decoder_sizes(tokenizer, TEXT_WIDTH, TEXT_LAYERS)
    return Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=8, **qwen_tokens(tokenizer)))


def klein(seed: int = 0) -> Flux2KleinPipeline:
    """Return a klein pipeline with distilled guidance and random weights from a seed."""
    tokenizer = tokenizers.qwen2(KLEIN_CHAT_TEMPLATE)
    pipe = Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=autoencoder(),
        text_encoder=klein_text_encoder(tokenizer),
        tokenizer=tokenizer,
        transformer=transformer(guided=False),
        is_distilled=True,
    )
    return weights.fill(pipe, seed)
