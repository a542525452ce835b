"""A layer whose messages return to the rank that sends them: codecs run as in collectives, without communication."""

from collections.abc import Mapping

import torch

from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS
from xfuser_cocodiff.engine.compression.codecs import Codec
from xfuser_cocodiff.engine.compression.layer_codecs import CodecStats, LayerCodecs
from xfuser_cocodiff.engine.compression.message import Message

_LOCAL_SLOTS, NUM_SLOTS = range(1), 2
"""Slots of this rank, and all slots of a message: this rank's, and one that it sends to and receives from."""
_MESSAGES = ("qkv", "o")


class Loopback:
    """A layer by heads on one of two coordinates of a slow axis, both ends of whose link are in this process."""

    def __init__(self) -> None:
        self.link_states: dict = {}
        """Link states by tensor and head group; the received references are those of the other end."""

    def send(
        self, values: Mapping[str, torch.Tensor], codecs: Mapping[str, Codec], seed: int = 0
    ) -> tuple[dict[str, torch.Tensor], CodecStats]:
        """Encode Q, K, V and O of a step, and decode them.

        Args:
            values: (NUM_SLOTS, G, H, T, D) for each of q, k, v and o.
            codecs: codec of each tensor.
            seed: seed of random token scores.

        Returns:
            What the other end decodes of each tensor, (1, G, H, T, D), and the statistics of the step.
        """
        layer_codecs = LayerCodecs(None, codecs, self.link_states, CodecStats(), seed)
        decoded: dict[str, torch.Tensor] = {}
        for names in _MESSAGES:
            sent = [values[name] for name in names]
            targets = [torch.empty_like(each) for each in sent]
            message = Message(names, sent, layer_codecs, ALL_HEADS, _LOCAL_SLOTS)
            message.decode(message.encode(), targets, lambda buffer: buffer)
            decoded |= {name: target[len(_LOCAL_SLOTS) :] for name, target in zip(names, targets, strict=True)}
        return decoded, layer_codecs.stats
