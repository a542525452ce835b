"""The choice of how a tensor is coded in a step, by the states of its link and of the leading branch's.

Both ends of a link make the same choice: it depends on shapes and earlier collectives only.

Sizes in shapes: L links, G groups of tokens, H heads, T tokens, D head dim, as in :mod:`codec`.
"""

import enum
from dataclasses import replace
from typing import NamedTuple

import torch

from xfuser_cocodiff.engine.codec.active_tokens import ActiveTokens, select_tokens
from xfuser_cocodiff.engine.codec.codec import SELECTING, TOKEN_DIM, Codec
from xfuser_cocodiff.engine.codec.lead import Lead
from xfuser_cocodiff.engine.comm.head_group import HeadGroup
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs, LinkState, Selection


class Link(enum.Enum):
    """State of a tensor's own link references."""

    BROKEN = "a collective has started and never ended, so that the references of both ends may differ"
    EMPTY = "there is no reference that fits"
    VALUES = "both ends hold a reference of the values"
    DIFFERENCE = "both ends hold a reference of the difference to the leading branch"


class Leader(enum.Enum):
    """State of the tensor in the leading branch."""

    NONE = "the tensor follows none"
    LOST = "the leading branch has no reference that both ends hold"
    IDLE = "it has a reference, and has not sent this tensor in this step"
    SENT = "it has sent the tensor in this step, and does not keep what it sent"
    KEPT = "it keeps what it sent"


class Coding(NamedTuple):
    """How a tensor is coded."""

    has_reference: bool
    """Whether the codec of the step is used, else that of keyframes."""
    may_extrapolate: bool = True
    """Whether a keyframe's reference may be kept as the previous one of the next step."""
    is_difference: bool = False
    """Whether the difference to the leading branch is coded, unless values are sent unquantized."""
    leaves_difference: bool = False
    """Whether the difference to the leading branch is left as the reference for the next step."""


_ALONE, _KEYFRAME, _RESET = Coding(True), Coding(False), Coding(False, may_extrapolate=False)


def _next(coding: Coding) -> Coding:
    """Return a coding by itself that leaves the difference as reference."""
    return coding._replace(leaves_difference=True)


def _joint(coding: Coding) -> Coding:
    """Return a coding of the difference."""
    return coding._replace(is_difference=True, leaves_difference=True)


TABLE: dict[Link, dict[Leader, Coding]] = {
    Link.BROKEN: {
        Leader.NONE: _RESET,
        Leader.LOST: _RESET,
        Leader.IDLE: _RESET,
        Leader.SENT: _next(_RESET),
        Leader.KEPT: _joint(_RESET),
    },
    Link.EMPTY: {
        Leader.NONE: _KEYFRAME,
        Leader.LOST: _KEYFRAME,
        Leader.IDLE: _KEYFRAME,
        Leader.SENT: _next(_KEYFRAME),
        Leader.KEPT: _joint(_KEYFRAME),
    },
    Link.VALUES: {
        Leader.NONE: _ALONE,
        Leader.LOST: _ALONE,
        Leader.IDLE: _ALONE,
        Leader.SENT: _next(_ALONE),
        Leader.KEPT: _joint(_ALONE),
    },
    Link.DIFFERENCE: {  # values can be had from it only with the leading branch's reference
        Leader.NONE: _KEYFRAME,
        Leader.LOST: _KEYFRAME,
        Leader.IDLE: _ALONE,
        Leader.SENT: _next(_ALONE),
        Leader.KEPT: _joint(_ALONE),
    },
}
"""How a tensor is coded by the states of its link and of its leader."""


def choose(
    layer_codecs: LayerCodecs, name: str, head_group: HeadGroup, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Codec, Lead | None]:
    """Return the codec of a tensor, and the leading branch at the sender; None if it follows none.

    Args:
        layer_codecs: codecs of the layer.
        name: name of the tensor.
        head_group: head group of the values.
        shape: (L, G, H, T, D).
        dtype: type of the values.
    """
    codec, state = layer_codecs.step.codecs[name], layer_codecs.link_state(name, head_group)
    leader = layer_codecs.leader_of(name, head_group)
    coding = TABLE[_link_of(state, shape, dtype)][_leader_of(leader, layer_codecs.step.number, shape, dtype)]
    if not (coding.has_reference or codec.is_keyframe):
        codec = layer_codecs.step.keyframe_codec
        codec = codec if coding.may_extrapolate else replace(codec, predicts=False)
    elif codec.selects_tokens and name not in SELECTING:
        codec = _with_selection(codec, layer_codecs, name, head_group, shape)
    if leader is None:
        return codec, None
    is_coded = coding.is_difference and codec.bits is not None
    sent = leader.sent_values.kept if is_coded and leader.sent_values else None
    return codec, Lead(leader.sent, is_coded, coding.leaves_difference, sent)


def _link_of(state: LinkState, shape: tuple[int, ...], dtype: torch.dtype) -> Link:
    if state.in_flight:
        return Link.BROKEN
    if not state.sent.fits(shape, dtype):
        return Link.EMPTY
    return Link.DIFFERENCE if state.sent.is_difference else Link.VALUES


def _leader_of(leader: LinkState | None, step: int, shape: tuple[int, ...], dtype: torch.dtype) -> Leader:
    if leader is None:
        return Leader.NONE
    sent = leader.sent_values
    if leader.in_flight:
        return Leader.LOST
    if sent and (sent.step, sent.dtype, sent.shape) == (step, dtype, shape):
        return Leader.SENT if sent.kept is None else Leader.KEPT
    return Leader.IDLE if leader.sent.has_values and leader.sent.shape == shape else Leader.LOST


def _with_selection(
    codec: Codec, layer_codecs: LayerCodecs, name: str, head_group: HeadGroup, shape: tuple[int, ...]
) -> Codec:
    """Return the codec of Q or K, which sends all tokens if V has no selection for them."""
    selection = layer_codecs.selections.get((selecting_name(name), head_group))
    is_there = selection is not None and selection.sent.tokens == shape[TOKEN_DIM]
    return codec if is_there else replace(codec, token_fraction=1.0)


def active_tokens_for(
    layer_codecs: LayerCodecs,
    name: str,
    head_group: HeadGroup,
    values: torch.Tensor,
    codec: Codec,
    local_slots: range | None = None,
) -> ActiveTokens:
    """Return the tokens of a tensor that are sent: its own selection or V's.

    Args:
        layer_codecs: keeps the selections.
        name: name of the tensor.
        head_group: head group of the values.
        values: (P, G, H, T, D).
        codec: codec of the tensor, which selects tokens.
        local_slots: slots of this rank, which are skipped; None for none.
    """
    if name in SELECTING:
        reference = layer_codecs.link_state(name, head_group).sent
        active = select_tokens(values, reference, codec, local_slots)
        layer_codecs.selections[name, head_group] = Selection(active)
        return active
    return layer_codecs.selections[selecting_name(name), head_group].sent


def selecting_name(name: str) -> str:
    """Return the name of the tensor whose active tokens a tensor has: its own, or V."""
    return name if name in SELECTING else "v"
