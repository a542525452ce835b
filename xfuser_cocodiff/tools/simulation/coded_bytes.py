"""Bytes of coded messages, by the codecs of a schedule."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from xfuser_cocodiff.engine.codec.codec import SELECTING, TOKEN_DIM, Codec, message_layout


def link_bytes(codecs: Mapping[str, Codec], names: str, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> int:
    """Return the bytes of a message on one link at one step: the message's flag, token masks and payloads.

    Args:
        codecs: codec of each tensor.
        names: letters of the tensors, of "qkvo".
        shapes: (L, G, H, T, D) of each.
        dtype: type of the values.
    """
    shape_of = dict(zip(names, shapes, strict=True))
    tensors = []
    for name, shape in shape_of.items():
        codec = codecs[name]
        if codec.selects_tokens and name not in SELECTING and shape[TOKEN_DIM] != shape_of["v"][TOKEN_DIM]:
            codec = replace(codec, token_fraction=1.0)  # V's selection is of other tokens
        tensors.append((name, codec, shape))
    return message_layout(tuple(tensors), dtype).nbytes
