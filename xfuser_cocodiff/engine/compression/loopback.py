"""A layer whose messages return to the rank that sends them: codecs run as in collectives, without communication."""

import copy
from collections.abc import Mapping, Sequence

import torch

from xfuser_cocodiff.engine.codec.codec import Codec
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.compression.layer_codecs import CodecStats, LayerCodecs
from xfuser_cocodiff.engine.compression.message import Message
from xfuser_cocodiff.engine.compression.step_codecs import StepCodecs
from xfuser_cocodiff.engine.compression.step_errors import StepErrors

_LOCAL_SLOTS, NUM_SLOTS = range(1), 2
"""Slots of this rank, and all slots of a message: this rank's, and one that it sends to and receives from."""
BY_HEADS = ("qkv", "o")
"""Tensors of each message of a layer by heads."""


class Loopback:
    """A layer on one of two coordinates of a slow axis, both ends of whose link are in this process.

    Args:
        messages: letters of the tensors of each message.
        is_joint: whether a following branch is coded as the difference to the leading one.
        leader: this layer in the leading branch, which sends first in each step; None for that branch.
    """

    def __init__(
        self,
        messages: Sequence[str] = BY_HEADS,
        is_joint: bool = False,
        leader: "Loopback | None" = None,
    ) -> None:
        self.messages = messages
        self.is_joint, self.leader = is_joint, leader
        self.link_states: dict = {}
        """Link states by tensor and head group; the received references are those of the other end."""

    def copy(self) -> "Loopback":
        """Return a layer with copies of the link states, and with the same leading branch."""
        copied = copy.copy(self)
        copied.link_states = copy.deepcopy(self.link_states)
        return copied

    def send(
        self, values: Mapping[str, torch.Tensor], codecs: Mapping[str, Codec], step: int = 0
    ) -> tuple[dict[str, torch.Tensor], StepErrors]:
        """Encode the messages of a step, and decode them.

        Args:
            values: (NUM_SLOTS, G, H, T, D) for each tensor.
            codecs: codec of each tensor.
            step: number of the step.

        Returns:
            What the other end decodes of each tensor, (1, G, H, T, D), and the errors of the step.
        """
        layer_codecs = LayerCodecs(
            None,
            StepCodecs(codecs=codecs, number=step, is_joint=self.is_joint),
            self.link_states,
            CodecStats(),
            StepErrors(),
            leader=self.leader.link_states if self.leader else None,
            keeps_values=self.is_joint and self.leader is None,
        )
        decoded: dict[str, torch.Tensor] = {}
        for names in self.messages:
            sent = [values[name] for name in names]
            targets = [torch.empty_like(each) for each in sent]
            message = Message(Label(names), sent, layer_codecs, _LOCAL_SLOTS)
            message.decode(message.encode(), targets, lambda buffer: buffer)
            decoded |= {name: target[len(_LOCAL_SLOTS) :] for name, target in zip(names, targets, strict=True)}
        return decoded, layer_codecs.errors
