"""How the tensors of a layer travel at one step: their codecs, what both ends of its links hold, and the account.

Sizes in shapes: L links, G groups of tokens, H heads, T tokens, D head dim, as codecs have them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from xfuser_cocodiff.engine.comm.comm_stream import CommStream
from xfuser_cocodiff.engine.comm.head_group import HeadGroup
from xfuser_cocodiff.engine.compression import codecs
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.codecs import EXACT, Codec, LinkReference, QuantError
from xfuser_cocodiff.engine.kernels.rows import ActiveTokens


@dataclass
class LinkState:
    """A head group of a tensor of one layer, as both ends of this rank's links know it."""

    sent: LinkReference
    received: LinkReference
    in_flight: bool = False
    """Whether an exchange has begun and not ended: the ends do not agree until it has."""

    @property
    def nbytes(self) -> int:
        """What is held."""
        return self.sent.nbytes + self.received.nbytes

    def to_int8(self, comm_stream: CommStream | None = None) -> None:
        """Keep references in 8 bits from now on; the other ends must do the same between the same two exchanges.

        Args:
            lane: in which, and on whose stream, values are encoded; None where their exchanges are started.
        """
        if comm_stream:
            comm_stream.start("squeezing references", self.sent.to_int8).wait()
        else:
            self.sent.to_int8()
        self.received.to_int8()


@dataclass
class Choice:
    """Active tokens of one step: those that this rank sends, and those that it gets."""

    sent: ActiveTokens
    received: ActiveTokens | None = None


@dataclass
class CodecStats:
    """What codecs saved and what they left out."""

    sent_bytes: int = 0
    """Sent to other places on slow axes, by this rank as the first."""
    exact_bytes: int = 0
    """What that would have been without codecs."""
    losses: list[QuantError] = field(default_factory=list)
    """What receivers lack, of each tensor that was not sent as it is. They stay on their device until somebody asks."""
    repeated: int = 0
    """Exchanges that were repeated exactly, since there were values that are not finite. On an accelerator the host
    would have to wait to know; the next step is exact there instead."""


@dataclass
class LayerCodecs:
    """How the tensors of a layer travel at one step."""

    partition: AxisPartition | None
    """None among virtual ranks."""
    codecs: Mapping[str, Codec]
    """For each of q, k, v and o; those of Q, K and V send as many tokens."""
    link_states: dict[tuple[str, HeadGroup], LinkState]
    """Of the layer; they outlive the step."""
    stats: CodecStats
    """Where it is all counted."""
    seed: int = 0
    """For choices by chance: another at each step."""
    compact: bool = False
    """Whether references are kept in 8 bits."""
    keyframe_codec: Codec = EXACT
    """For what has no reference; needs none."""
    single_stage: bool = False
    """How its exchanges go, see :mod:`exchange`; what is held fits one way only."""
    choices: dict[tuple[str, HeadGroup], Choice] = field(default_factory=dict)
    """Active tokens that V and O have chosen at this step."""

    @property
    def is_stateless(self) -> bool:
        """Whether nothing needs a reference, as at the first step."""
        return all(codec.is_stateless for codec in self.codecs.values())

    def link_state(self, name: str, head_group: HeadGroup) -> LinkState:
        """The wire of a head group of a tensor."""
        if (name, head_group) not in self.link_states:
            self.link_states[name, head_group] = LinkState(LinkReference(self.compact), LinkReference(self.compact))
        return self.link_states[name, head_group]


def codec_for(
    layer_codecs: LayerCodecs, name: str, head_group: HeadGroup, shape: Sequence[int], dtype: torch.dtype
) -> Codec:
    """How a tensor (L, G, H, T, D) travels: anew while there is no reference, or where the last exchange never ended;
    with all tokens where V has made no choice for it.

    Depends on shapes and on what was sent before, which are the same on every rank.
    """
    codec, link_state = layer_codecs.codecs[name], layer_codecs.link_state(name, head_group)
    if codec.is_keyframe:
        return codec
    if link_state.in_flight or not link_state.sent.fits(shape, dtype):
        return layer_codecs.keyframe_codec  # nor is the change from what may be held now one that both ends know
    if codec.chooses and name not in codecs.CHOOSING:
        choice = layer_codecs.choices.get(("v", head_group))
        if choice is None or choice.sent.tokens != shape[codecs.TOKENS]:
            return replace(codec, share=1.0)
    return codec


def active_for(
    layer_codecs: LayerCodecs,
    name: str,
    head_group: HeadGroup,
    values: torch.Tensor,
    codec: Codec,
    here: range | None = None,
) -> ActiveTokens | None:
    """The tokens that are sent: a choice made here, or V's; None where it is all of them, or none."""
    if not codec.chooses:
        return None
    if name in codecs.CHOOSING:
        chosen = codecs.choose(values, layer_codecs.link_state(name, head_group).sent, codec, layer_codecs.seed, here)
        layer_codecs.choices[name, head_group] = Choice(chosen)
        return chosen
    return layer_codecs.choices["v", head_group].sent


def is_finite(loss: QuantError) -> bool:
    """Whether the values were: the difference of infinite values is not a number."""
    return math.isfinite(loss.lacking.item())
