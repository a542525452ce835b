"""Precisions of mode `auto`: the bits of its schedule, and higher ones up to lossless, for each kind of layer."""

import math
import re
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from xfuser_cocodiff.engine.compression.bit_allocation import LETTERS
from xfuser_cocodiff.engine.compression.codec import Codec
from xfuser_cocodiff.engine.compression.modes import DEFAULT_STEPS, CodecSchedule
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes

SCHEDULED = 0.0
"""Precision of the schedule's own bits, the lowest one."""
LOSSLESS = math.inf
"""Precision of values that are sent unchanged."""
_HIGHER = (4.0, 8.0, LOSSLESS)
"""Bits per value of all tensors above the schedule's."""
_SAMPLE_TOKENS = 64
"""Number of tokens for which the bytes of a precision are computed; all precisions send all tokens."""


class LayerKind(NamedTuple):
    """What layers share that run with the same precision; equal on all ranks."""

    name: str
    """Name of the layers, with * in place of each number."""
    sizes: LayerSizes
    """Sizes of a layer's tensors on a rank, in the leading branch."""
    gathers_kv: bool
    """Whether K and V are gathered along the slow axes."""
    schedule: str
    """Codec schedule of the run."""
    precisions: tuple[float, ...]
    """Precisions of the run in bits per value, lowest first, the first of which is :data:`SCHEDULED`."""


class PrecisionChoice(NamedTuple):
    """Precision of a kind of layer, as the tuning cache keeps it."""

    precision: float
    """Bits per value."""
    is_final: bool
    """Whether there is none higher left to try."""


@dataclass
class KindLoad:
    """What the layers of a kind sent in one step."""

    calls: int = 0
    """Number of layers, counted per branch."""
    sent_bytes: int = 0
    """Bytes that this rank sent as the source to other coordinates on slow axes."""
    exact_bytes: int = 0
    """Bytes that the same values take without codecs."""


@dataclass(frozen=True)
class StepLoad:
    """What the layers of all kinds sent in one step."""

    kinds: dict[LayerKind, KindLoad]
    is_representative: bool
    """Whether all layers used references of earlier steps, and later steps have the same schedule."""


def kind_name(layer: str) -> str:
    """Return the name that all layers of a stack share: that of a layer, with * in place of each number."""
    return re.sub(r"\d+", "*", layer)


def precisions_of(schedule: CodecSchedule, total: int | None) -> tuple[float, ...]:
    """Return the precisions of a run, lowest first: the schedule's own, and all that raise K or V and lower no tensor.

    Gathered or by heads, K and V are coded.
    """
    coded = [step for step in range(total or DEFAULT_STEPS) if not schedule.is_keyframe_step(step)]
    codecs = [schedule.codecs(step, total) for step in coded]
    most = {name: max((each[name].bits or 0.0 for each in codecs), default=0.0) for name in LETTERS}
    least = min(most[name] for name in "kv")
    return (SCHEDULED, *(bits for bits in _HIGHER if bits > least and bits >= max(most.values())))


def at_precision(codec: Codec, precision: float) -> Codec:
    """Return a codec of the schedule at a precision, which sends all tokens unless it is the schedule's own.

    A lossless codec keeps references up to date, so that a lower precision may follow without a keyframe.
    """
    if precision == SCHEDULED or codec.is_exact:
        return codec
    if precision == LOSSLESS:
        return Codec(predictor=codec.predictor)
    return replace(codec, bits=max(codec.bits or 0.0, precision), token_fraction=1.0)


def sent_fraction(precision: float, sizes: LayerSizes) -> float:
    """Return the bytes of tensors at a precision above the schedule's, relative to lossless ones."""
    if precision == LOSSLESS:
        return 1.0
    shape = (1, 1, 1, _SAMPLE_TOKENS, sizes.head_dim)
    return Codec(precision).payload_bytes(shape, torch.uint8) / math.prod(shape) / sizes.value_bytes


def describe(precision: float) -> str:
    """Return a precision in words."""
    if precision == SCHEDULED:
        return "bits of 'balanced'"
    return "lossless" if precision == LOSSLESS else f"{precision:g} bits"
