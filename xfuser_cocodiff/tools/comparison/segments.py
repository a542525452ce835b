"""Text and image segments among the tokens of an attention layer, by the arguments of its transformer.

A rank of a Ulysses group holds a part of each segment. One rank with virtual ranks holds both whole.
"""

import math
from collections.abc import Mapping

import torch
from torch import nn

_IMAGE_FIRST = ("SD3", "HunyuanVideo", "ZImage", "LingBot")
"""Prefixes of the names of transformers that put the image before the text; the others put the text first."""


def segments(transformer: nn.Module, shapes: Mapping[str, torch.Size], tokens: int) -> list[int]:
    """Return the number of tokens of each segment, in their order.

    Args:
        transformer: transformer of diffusers, or xDiT's wrapper of it.
        shapes: shapes of its arguments by name.
        tokens: number of tokens of the attention layer.
    """
    text, image = shapes.get("encoder_hidden_states"), shapes.get("hidden_states")
    if text is None or image is None or len(text) != 3 or tokens - text[1] not in _image_tokens(transformer, image):
        return [tokens]  # attention to the image alone
    image_first = any(base.__name__.startswith(_IMAGE_FIRST) for base in type(transformer).__mro__)
    return [tokens - text[1], text[1]] if image_first else [text[1], tokens - text[1]]


def _image_tokens(transformer: nn.Module, image: torch.Size) -> set[int]:
    """Return the possible numbers of tokens of an image or video.

    Args:
        transformer: transformer, whose config has the patch size.
        image: shape (B, N, C) or (B, C, H, W) of an image, (B, C, F, H, W) or (B, F, C, H, W) of a video.
    """
    if len(image) == 3:
        return {image[1]}
    config = getattr(transformer, "config", None)
    patch = getattr(config, "patch_size", None) or 1
    sizes = (patch,) * 2 if isinstance(patch, int) else tuple(patch)
    temporal = getattr(config, "patch_size_t", None) or (sizes[0] if len(sizes) == 3 else 1)
    pixels = math.prod(image[-2:]) // math.prod(sizes[-2:])
    return {pixels} if len(image) == 4 else {pixels * frames // temporal for frames in image[1:3]}
