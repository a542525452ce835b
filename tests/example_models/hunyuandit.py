"""A small HunyuanDiT: 8 heads of 16, 128 x 128 pixels as 64 tokens."""

from diffusers import DDPMScheduler, HunyuanDiT2DModel, HunyuanDiTPipeline
from transformers import BertConfig, BertModel, BertTokenizer

from xfuser_cocodiff.models import captions, flux1, lumina2, tokenizers, weights

TEXT, TEXT_T5 = 77, 256
"""Tokens, as many as the pipeline makes."""


def transformer() -> HunyuanDiT2DModel:
    """4 blocks with skip connections."""
    return HunyuanDiT2DModel(
        num_attention_heads=8,
        attention_head_dim=16,
        in_channels=lumina2.LATENT_CHANNELS,
        patch_size=2,
        sample_size=16,
        hidden_size=128,
        num_layers=4,
        mlp_ratio=2.0,
        cross_attention_dim=flux1.TEXT_WIDTH,
        cross_attention_dim_t5=flux1.TEXT_WIDTH,
        pooled_projection_dim=64,
        text_len=TEXT,
        text_len_t5=TEXT_T5,
    )


def bert_tokenizer() -> BertTokenizer:
    """Whole words, and letters."""
    words = sorted({word.lower() for line in captions.CORPUS for word in line.split()})
    letters = [chr(code) for code in range(33, 127)]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters), *words]
    return BertTokenizer(
        vocab={piece: place for place, piece in enumerate(dict.fromkeys(pieces))}, model_max_length=TEXT
    )


def bert_encoder(tokenizer: BertTokenizer) -> BertModel:
    """A two-layer BERT over `tokenizer`, 64 wide."""
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=flux1.TEXT_WIDTH,
        intermediate_size=4 * flux1.TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return BertModel(config)


def pipeline() -> HunyuanDiTPipeline:
    """The whole pipeline, without its safety checker."""
    bert, t5 = bert_tokenizer(), tokenizers.t5()
    pipe = HunyuanDiTPipeline(
        vae=lumina2.autoencoder(),
        text_encoder=bert_encoder(bert),
        tokenizer=bert,
        transformer=transformer(),
        scheduler=DDPMScheduler(beta_schedule="scaled_linear", prediction_type="v_prediction", beta_end=0.02),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
        text_encoder_2=flux1.t5_encoder(t5),
        tokenizer_2=t5,
    )
    return weights.fill(pipe, seed=0)
