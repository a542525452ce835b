"""A small FLUX.2-klein-4B: the real classes with 24 heads of 8, random weights, 128 x 128 pixels as 256 tokens."""

from diffusers import FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, Flux2Transformer2DModel
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from xfuser_cocodiff.models import flux2, tokenizers, weights

# The pipeline stacks the hidden states 9, 18 and 27 of its text encoder, and in xDiT's script 10, 20 and 30.
TEXT_LAYERS = 30

# Qwen 3's, without its tools and thoughts.
CHAT_TEMPLATE = """
{%- for message in messages -%}
<|im_start|>{{ message.role }}{{ "\n" }}{{ message.content }}<|im_end|>{{ "\n" }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant{{ "\n" }}{%- endif -%}
""".strip()


def transformer() -> Flux2Transformer2DModel:
    """FLUX.2-dev's small transformer without guidance, which is distilled into klein."""
    return flux2.transformer(guided=False)


def text_encoder(tokenizer: PreTrainedTokenizerBase) -> Qwen3ForCausalLM:
    """A Qwen 3 over `tokenizer`, 32 wide and 30 layers deep."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=flux2.TEXT_WIDTH,
        intermediate_size=4 * flux2.TEXT_WIDTH,
        num_hidden_layers=TEXT_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        bos_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
    )
    return Qwen3ForCausalLM(config)


def pipeline(seed: int = 0) -> Flux2KleinPipeline:
    """The whole pipeline, with random weights from a seed."""
    tokenizer = tokenizers.qwen2(CHAT_TEMPLATE)
    pipe = Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=flux2.autoencoder(),
        text_encoder=text_encoder(tokenizer),
        tokenizer=tokenizer,
        transformer=transformer(),
        is_distilled=True,
    )
    return weights.fill(pipe, seed)
