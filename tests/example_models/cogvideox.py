"""A small CogVideoX: 8 heads of 16, 9 frames of 128 x 128 pixels as 192 tokens."""

from diffusers import AutoencoderKLCogVideoX, CogVideoXDDIMScheduler, CogVideoXPipeline, CogVideoXTransformer3DModel

from xfuser_cocodiff.models import flux1, tokenizers, weights

LATENT_CHANNELS = 4


def transformer() -> CogVideoXTransformer3DModel:
    """2 blocks."""
    return CogVideoXTransformer3DModel(
        num_attention_heads=8,
        attention_head_dim=16,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        time_embed_dim=16,
        text_embed_dim=flux1.TEXT_WIDTH,
        num_layers=2,
        sample_width=16,
        sample_height=16,
        sample_frames=9,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=226,
        use_rotary_positional_embeddings=True,
    )


def autoencoder() -> AutoencoderKLCogVideoX:
    """8 x downsampling in space and 4 x in time, to 4 channels."""
    return AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 16, 16),
        latent_channels=LATENT_CHANNELS,
        layers_per_block=1,
        norm_num_groups=8,
        sample_height=128,
        sample_width=128,
        scaling_factor=1.0,
    )


def pipeline() -> CogVideoXPipeline:
    """The whole pipeline."""
    t5 = tokenizers.t5()
    pipe = CogVideoXPipeline(
        tokenizer=t5,
        text_encoder=flux1.t5_encoder(t5),
        vae=autoencoder(),
        transformer=transformer(),
        scheduler=CogVideoXDDIMScheduler(prediction_type="v_prediction"),
    )
    return weights.fill(pipe, seed=0)
