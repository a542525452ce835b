"""A small FLUX.1-dev: the real classes with 8 heads of 16, trained weights, 128 x 128 pixels as 256 tokens."""

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerBase, T5Config, T5EncoderModel

from xfuser_cocodiff.models import tokenizers

TEXT_WIDTH = 64
LATENT_CHANNELS = 4


def transformer() -> FluxTransformer2DModel:
    """About 2.3 million parameters: 2 double and 4 single blocks."""
    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4 * LATENT_CHANNELS,  # patches of 2 x 2
        num_layers=2,
        num_single_layers=4,
        attention_head_dim=16,
        num_attention_heads=8,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=TEXT_WIDTH,
        guidance_embeds=True,
        # FLUX.1 gives every token 0 on the first axis; the dims go to rows and columns, which have little to spare.
        axes_dims_rope=(0, 8, 8),
    )


def autoencoder() -> AutoencoderKL:
    """4 x downsampling to 4 channels; no attention, so that it can be trained on crops."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 64),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=128,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
        scaling_factor=1.0,
        shift_factor=0.0,
    )


def clip_encoder(tokenizer: PreTrainedTokenizerBase) -> CLIPTextModel:
    """A two-layer CLIP text encoder over `tokenizer`, 64 wide."""
    config = CLIPTextConfig(
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
    return CLIPTextModel(config)


def t5_encoder(tokenizer: PreTrainedTokenizerBase) -> T5EncoderModel:
    """A two-layer T5 encoder over `tokenizer`, 64 wide."""
    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=TEXT_WIDTH,
        d_kv=16,
        d_ff=4 * TEXT_WIDTH,
        num_layers=2,
        num_heads=4,
        feed_forward_proj="gated-gelu",
    )
    return T5EncoderModel(config)


def pipeline(seed: int = 0) -> FluxPipeline:
    """The whole pipeline, untrained, from a seed."""
    torch.manual_seed(seed)
    clip, t5 = tokenizers.clip(), tokenizers.t5()
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=autoencoder(),
        text_encoder=clip_encoder(clip),
        tokenizer=clip,
        text_encoder_2=t5_encoder(t5),
        tokenizer_2=t5,
        transformer=transformer(),
    )
