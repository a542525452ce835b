"""Builds small tokenizers of the classes that the pipelines load, with a vocabulary from a small corpus."""

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, trainers
from transformers import CLIPTokenizer, Qwen2Tokenizer, T5Tokenizer

from small_models.captions import CORPUS

_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
# Words that chat templates put at the start of a line. With one token each, the system message of Qwen-Image has the 34
# tokens that its pipeline drops.
_LINE_STARTS = ["system", "user", "assistant", "Describe", "You"]


def clip() -> CLIPTokenizer:
    """Return a byte-level BPE tokenizer with end-of-word markers and at most 77 tokens."""
    start, end = "<|startoftext|>", "<|endoftext|>"
    vocab, merges = _train_bpe(CORPUS, end_of_word="</w>", specials=[start, end], lowercase=True)
    return CLIPTokenizer(vocab=vocab, merges=merges, pad_token=end, model_max_length=77)


def t5(corpus: Sequence[str] = CORPUS) -> T5Tokenizer:
    """Return a unigram tokenizer of whole words with a fallback to characters; it needs no training."""
    words = sorted({form for line in corpus for word in line.split() for form in (word.lower(), word.capitalize())})
    letters = [chr(code) for code in range(33, 127)]
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0), ("▁", -4.0)]
    vocab += [(f"▁{word}", -2.0) for word in words] + [(letter, -8.0) for letter in letters]
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=512)


def qwen2(chat_template: str | None = None, **named: str) -> Qwen2Tokenizer:
    """Return a byte-level BPE tokenizer with the chat and vision tokens of Qwen 2 and 2.5-VL.

    Args:
        chat_template: Jinja template of the chat; None for none.
        named: special tokens that processors access by name.
    """
    end = "<|endoftext|>"
    special_tokens = [
        "<|im_start|>",
        "<|im_end|>",
        "<|vision_start|>",
        "<|vision_end|>",
        "<|image_pad|>",
        "<|video_pad|>",
    ]
    lines = [f" {line}" for line in CORPUS] + _LINE_STARTS
    vocab, merges = _train_bpe(lines, end_of_word="", specials=[end, *special_tokens], lowercase=False)
    tokenizer = Qwen2Tokenizer(
        vocab=vocab, merges=merges, model_max_length=4096, extra_special_tokens=special_tokens, **named
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def _train_bpe(
    lines: list[str], end_of_word: str, specials: list[str], lowercase: bool
) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Train byte-level BPE on some lines; return the vocabulary and the merges."""
    backend = Backend(models.BPE(end_of_word_suffix=end_of_word))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if end_of_word:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(False)]
        )
    if lowercase:
        backend.normalizer = normalizers.Lowercase()
    suffix: dict[str, Any] = {"end_of_word_suffix": end_of_word} if end_of_word else {}
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=specials + [letter + end_of_word for letter in _BYTES if end_of_word],
        initial_alphabet=_BYTES,
        show_progress=False,
        **suffix,
    )
    backend.train_from_iterator(lines, trainer)
    state = json.loads(backend.to_str())["model"]
    return state["vocab"], [tuple(pair) for pair in state["merges"]]
