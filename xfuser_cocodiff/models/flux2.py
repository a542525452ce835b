"""A small FLUX.2-dev: the real classes with 24 heads of 8, random weights, 128 x 128 pixels as 256 tokens."""

from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2Pipeline, Flux2Transformer2DModel
from transformers import Mistral3Config, Mistral3ForConditionalGeneration, PreTrainedTokenizerBase

from xfuser_cocodiff.models import tokenizers, weights

TEXT_WIDTH = 32
# The pipeline stacks the hidden states 10, 20 and 30 of its text encoder.
TEXT_LAYERS, TEXT_STATES = 30, 3

# The user's words only: FLUX.2's system message is the same for every prompt, and in a short max_sequence_length it
# would leave no room for them.
CHAT_TEMPLATE = """
{%- for message in messages if message.role == "user" -%}
{%- for part in message.content if part.type == "text" -%}<|im_start|>{{ part.text }}<|im_end|>{%- endfor -%}
{%- endfor -%}
""".strip()


def transformer(guided: bool = True) -> Flux2Transformer2DModel:
    """2 double and 4 single blocks, which are told of the guidance or, where that is distilled into them, are not."""
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
    """4 x downsampling to 8 channels."""
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
    """A Mistral 3 over `tokenizer`, 32 wide and 30 layers deep; its vision tower is there but never runs."""
    text = dict(
        model_type="mistral",
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=4 * TEXT_WIDTH,
        num_hidden_layers=TEXT_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=None,
    )
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
    """The whole pipeline, with random weights from a seed.

    The tokenizer is a Qwen2Tokenizer: the real one, a PixtralProcessor, needs torchvision even where no image comes in.
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
