"""A layer whose messages return to the rank that sends them: codecs run as in collectives, without communication."""

import copy
from collections.abc import Mapping, Sequence

import torch

from xfuser_cocodiff.engine.codec.codec import Codec
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.compression.layer_codecs import CodecStats, LayerCodecs
from xfuser_cocodiff.engine.compression.message import Message

_LOCAL_SLOTS, NUM_SLOTS = range(1), 2
"""Slots of this rank, and all slots of a message: this rank's, and one that it sends to and receives from."""
BY_HEADS = ("qkv", "o")
"""Tensors of each message of a layer by heads."""


class Loopback:
    """A layer on one of two coordinates of a slow axis, both ends of whose link are in this process.

    Args:
        messages: letters of the tensors of each message.
        joint: weight of the leading branch in the difference that is coded for the following one.
        leader: this layer in the leading branch, which sends first in each step; None for that branch.
    """

    def __init__(
        self,
        messages: Sequence[str] = BY_HEADS,
        joint: float = 0.0,
        leader: "Loopback | None" = None,
    ) -> None:
        self.messages = messages
        self.joint, self.leader = joint, leader
        self.link_states: dict = {}
        """Link states by tensor and head group; the received references are those of the other end."""

    def copy(self) -> "Loopback":
        """Return a layer with copies of the link states, and with the same leading branch."""
        copied = copy.copy(self)
        copied.link_states = copy.deepcopy(self.link_states)
        return copied

    def send(
        self, values: Mapping[str, torch.Tensor], codecs: Mapping[str, Codec], step: int = 0
    ) -> tuple[dict[str, torch.Tensor], CodecStats]:
        """Encode the messages of a step, and decode them.

        Args:
            values: (NUM_SLOTS, G, H, T, D) for each tensor.
            codecs: codec of each tensor.
            step: number of the step.

        Returns:
            What the other end decodes of each tensor, (1, G, H, T, D), and the statistics of the step.
        """
        layer_codecs = LayerCodecs(
            None,
            codecs,
            self.link_states,
            CodecStats(),
            step=step,
            joint=self.joint,
            leader=self.leader.link_states if self.leader else None,
            keeps_values=bool(self.joint) and self.leader is None,
        )
        decoded: dict[str, torch.Tensor] = {}
        for names in self.messages:
            sent = [values[name] for name in names]
            targets = [torch.empty_like(each) for each in sent]
            message = Message(Label(names), sent, layer_codecs, _LOCAL_SLOTS)
            message.decode(message.encode(), targets, lambda buffer: buffer)
            decoded |= {name: target[len(_LOCAL_SLOTS) :] for name, target in zip(names, targets, strict=True)}
        return decoded, layer_codecs.stats
