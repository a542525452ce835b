"""Where text and image lie in the tokens of an attention layer, by what its transformer was given.

Ranks of a Ulysses group have their share of each, one behind the other. One rank that stands for many sees both whole.
"""

import math
from collections.abc import Mapping

import torch
from torch import nn

_IMAGE_FIRST = ("SD3", "HunyuanVideo", "ZImage", "LingBot")
"""Beginnings of the names of transformers that put the image before the text; with the others it is the other way
round."""


def segments(transformer: nn.Module, shapes: Mapping[str, torch.Size], tokens: int) -> list[int]:
    """Tokens of each segment, in their order.

    Args:
        transformer: as diffusers has it, or in xDiT's wrapper.
        shapes: of what it was called with, by name.
        tokens: of the attention layer.
    """
    text, image = shapes.get("encoder_hidden_states"), shapes.get("hidden_states")
    if text is None or image is None or len(text) != 3 or tokens - text[1] not in _image_tokens(transformer, image):
        return [tokens]  # attention to the image alone
    names = [base.__name__ for base in type(transformer).__mro__]
    image_first = any(name.startswith(_IMAGE_FIRST) for name in names)
    return [tokens - text[1], text[1]] if image_first else [text[1], tokens - text[1]]


def _image_tokens(transformer: nn.Module, image: torch.Size) -> set[int]:
    """How many tokens an image (B, N, C), (B, C, H, W) or a video (B, C, F, H, W) or (B, F, C, H, W) may come to."""
    if len(image) == 3:
        return {image[1]}
    config = getattr(transformer, "config", None)
    patch = getattr(config, "patch_size", None) or 1
    sizes = (patch,) * 2 if isinstance(patch, int) else tuple(patch)
    temporal = getattr(config, "patch_size_t", None) or (sizes[0] if len(sizes) == 3 else 1)
    pixels = math.prod(image[-2:]) // math.prod(sizes[-2:])
    return {pixels} if len(image) == 4 else {pixels * frames // temporal for frames in image[1:3]}
