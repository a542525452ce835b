"""Modes: schedules of codecs over the steps of a run, and the notation that changes them."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from xfuser_cocodiff.engine.compression import bit_allocation
from xfuser_cocodiff.engine.compression.bit_allocation import LETTERS, MAX_JOINT, NOT_SENT, BitAllocation
from xfuser_cocodiff.engine.compression.codec import (
    CHANGE,
    DRIFT,
    EXACT,
    SCORES,
    SELECTING,
    TOKEN_DIM,
    Codec,
    aligned,
    section_bytes,
)
from xfuser_cocodiff.engine.compression.link_reference import ADAPTIVE
from xfuser_cocodiff.engine.kernels.quantize import GRIDS

NOTATION = (
    "'warmup=2,first=8,refresh=10,cached=0->0.5,bits=4->2,bits_q=1.6,bits_o=2,score=drift,predictor=auto,"
    "joint=1,exact=blocks.0+blocks.1', any subset of these, or '@FILE' with or without some of them behind a comma"
)
Ramp = tuple[float, float]
"""Values at the first and the last step."""
LOSSLESS_RAMP = (None, None)
"""Bits of a tensor that is lossless though others of its message are not."""


@dataclass(frozen=True)
class CodecSchedule:
    """Codecs over the steps of a run.

    A ramp gives the values at the first and the last step; `cached` is interpolated linearly, bits switch halfway. A
    run of unknown length is scheduled like one of 50 steps, and keeps the last values after these. Fields are named as
    in the notation of `--cocodiff_schedule`.
    """

    warmup: int = 1
    """Number of keyframe steps at the start."""
    first: float | None = None
    """Bits per value at these; None sends them losslessly."""
    refresh: int = 0
    """Interval of lossless keyframe steps later on; 0 for none."""
    cached: Ramp = (0.0, 0.0)
    """Fraction of tokens of Q, K and V that are not sent."""
    bits: Ramp | None = None
    """Bits per value of Q, K and V; None sends the values themselves."""
    bits_q: Ramp | tuple[None, None] | None = None
    """Bits per value of Q if they differ."""
    bits_k: Ramp | tuple[None, None] | None = None
    """Bits per value of K if they differ."""
    bits_v: Ramp | tuple[None, None] | None = None
    """Bits per value of V if they differ."""
    bits_o: Ramp | None = None
    """Bits per value of O, of which all tokens are sent; None sends the values themselves."""
    score: str = DRIFT
    """Score that selects active tokens, one of codecs.SCORES."""
    predictor: float | str = 0.0
    """Gain of the prediction, see :attr:`Codec.predictor`."""
    joint: float = 0.0
    """Weight of the leading branch of guidance in the difference that is coded for the others; 0 to code each branch by
    itself, see :mod:`codecs`."""
    exact: tuple[str, ...] = ()
    """Layers that are lossless at all steps, by name or by prefix up to a dot."""
    allocation: BitAllocation | None = None
    """Bits by layer, tensor and phase, in place of all `bits` fields."""

    def is_keyframe_step(self, step: int) -> bool:
        """Return whether a step, counted from 0, uses no references of earlier steps."""
        since_warmup = step - self.warmup
        return since_warmup < 0 or bool(self.refresh and since_warmup % self.refresh == self.refresh - 1)

    @property
    def keyframe_codec(self) -> Codec:
        """Codec of the warmup steps, and of tensors without a reference at later steps."""
        return Codec(self.first, predictor=self.predictor, is_keyframe=self.first is not None)

    def codecs(self, step: int, total: int | None, layer: str | None = None) -> Mapping[str, Codec]:
        """Return the codecs of Q, K, V and O at a step.

        Args:
            step: step, counted from 0.
            total: number of steps; None if unknown.
            layer: name of the layer; None for the codecs that most layers have.
        """
        if self.is_keyframe_step(step):
            exact = replace(EXACT, predictor=self.predictor)
            return dict.fromkeys(LETTERS, self.keyframe_codec if step < self.warmup else exact)
        progress = min(1.0, step / max(1, (total or DEFAULT_STEPS) - 1))
        if self.allocation:
            return {
                name: Codec(bits or None, 0.0 if bits == NOT_SENT else 1.0, predictor=self.predictor)
                for name, bits in self.allocation.bits(layer, progress).items()
            }
        cached = self.cached[0] + progress * (self.cached[1] - self.cached[0])
        token_fraction = min(1.0, max(0.0, 1 - cached))
        ramps = {"q": self.bits_q or self.bits, "k": self.bits_k or self.bits, "v": self.bits_v or self.bits}
        found = {
            name: Codec(_bits_at(ramp, progress), token_fraction, self.score, self.predictor)
            for name, ramp in ramps.items()
        }
        o = Codec(_bits_at(self.bits_o, progress), predictor=self.predictor if self.bits_o else 0.0)
        return {**found, "o": o}

    def sent_bytes(
        self, names: str, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, total: int, batched_branches: int = 1
    ) -> list[int]:
        """Return the bytes of a message on one link, for each step of a run whose values are all finite.

        Args:
            names: letters of the tensors, of "qkvo".
            shapes: (L, G, H, T, D) of each.
            dtype: type of the values.
            total: number of steps.
            batched_branches: number of branches of guidance, of which G has equal parts; without `joint` they are coded
                as one tensor.
        """
        branches = batched_branches if self.joint else 1
        return [link_bytes(self.codecs(step, total), names, shapes, dtype, branches) for step in range(total)]

    def is_lossless_layer(self, layer: str) -> bool:
        """Return whether a layer is lossless at all steps."""
        return any(_matches(layer, name) for name in self.exact)

    def unmatched_layers(self, layers: Iterable[str]) -> list[str]:
        """Return names in `exact` that match none of a model's layers.

        Args:
            layers: names of all layers.
        """
        all_layers = list(layers)
        return [name for name in self.exact if not any(_matches(layer, name) for layer in all_layers)]

    @classmethod
    def parse(cls, text: str, base: "CodecSchedule") -> "CodecSchedule":
        """Return a schedule with changes in the notation of `--cocodiff_schedule`.

        Args:
            text: the changes, see NOTATION.
            base: schedule to change; if the text begins with a file, its schedule replaces all, but for `joint` if the
                file has none.

        Raises:
            ValueError: the text is not in the notation, or has values that no schedule has.
        """
        if text.startswith("@"):
            file, _, text = text.partition(",")
            allocation = bit_allocation.read(file)
            base = replace(cls.of(allocation), joint=base.joint if allocation.joint is None else allocation.joint)
            if not text:
                return base
        found: dict[str, Any] = {}
        for pair in text.split(","):
            name, _, value = (part.strip() for part in pair.partition("="))
            if name not in _READERS:
                raise ValueError(f"{text!r} has the unknown key {name!r}; valid are {NOTATION}")
            if base.allocation and name not in _BESIDE_FILES:
                raise ValueError(
                    f"{text!r} has {name!r}, which has no effect with a file; valid are {', '.join(_BESIDE_FILES)}"
                )
            if name in found:
                raise ValueError(f"{text!r} has {name!r} twice; valid is once")
            read, valid = _READERS[name]
            try:
                found[name] = read(value)
            except ValueError:
                raise ValueError(f"{text!r}: {value!r} is not valid for {name}; valid are {valid}") from None
        if "bits" in found:  # replaces the bits of Q, K and V, unless these are given too
            base = replace(base, bits_q=None, bits_k=None, bits_v=None)
        return replace(base, **found)

    @classmethod
    def of(cls, allocation: BitAllocation) -> "CodecSchedule":
        """Return the schedule of a bit allocation."""
        return cls(first=allocation.first, predictor=allocation.predictor, allocation=allocation)

    def __str__(self) -> str:
        if self.allocation:
            return self.allocation.source
        default = CodecSchedule()
        changed = [field.name for field in fields(self) if getattr(self, field.name) != getattr(default, field.name)]
        return ",".join(f"{name}={_to_notation(getattr(self, name))}" for name in changed) or "exact"


def link_bytes(
    codecs: Mapping[str, Codec], names: str, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, branches: int = 1
) -> int:
    """Return the bytes of a message on one link at one step: the message's flag, token masks and payloads.

    Args:
        codecs: codec of each tensor.
        names: letters of the tensors, of "qkvo".
        shapes: (L, G, H, T, D) of each.
        dtype: type of the values.
        branches: number of equal parts of G that have sections of their own; it divides G.
    """
    assert all(shape[1] % branches == 0 for shape in shapes), (shapes, branches)
    shape_of, size = dict(zip(names, shapes, strict=True)), aligned(1)
    for name, shape in shape_of.items():
        codec = codecs[name]
        if codec.selects_tokens and name not in SELECTING and shape[TOKEN_DIM] != shape_of["v"][TOKEN_DIM]:
            codec = replace(codec, token_fraction=1.0)  # V's selection is of other tokens
        links, groups, *rest = shape
        of_branch = links, groups // branches, *rest
        size += branches * sum(map(aligned, section_bytes(codec, name, of_branch, dtype)))
    return size


def _matches(layer: str, name: str) -> bool:
    """Return whether a layer's name is, or begins with, a name of `exact`."""
    return layer == name or layer.startswith(f"{name}.")


def _bits_at(ramp: Ramp | tuple[None, None] | None, progress: float) -> float | None:
    """Return the bits of a ramp, which switches halfway through the run."""
    return ramp and ramp[progress >= 0.5]


def _read_count(text: str) -> int:
    """Read a non-negative integer."""
    if not text.isdecimal():
        raise ValueError
    return int(text)


def _read_fraction(text: str, maximum: float = 1.0) -> float:
    """Read a number from 0 to a maximum."""
    value = float(text)
    if not 0 <= value <= maximum:
        raise ValueError
    return value


def _read_weight(text: str) -> float:
    """Read a weight of the leading branch."""
    return _read_fraction(text, MAX_JOINT)


def _one_of(valid: Collection, convert: Callable[[str], Any] = str) -> Callable[[str], Any]:
    """Return a reader of one of the valid values."""

    def read(text: str) -> Any:
        if (value := convert(text)) not in valid:
            raise ValueError
        return value

    return read


def _ramp(reader: Any) -> Any:
    """Return a reader of a ramp, such as 4->2, or of a constant."""

    def read(text: str) -> tuple:
        first, arrow, last = text.partition("->")
        return reader(first), reader(last if arrow else first)

    return read


def _or_exact(reader: Callable[[str], Any], exact: Any = None) -> Callable[[str], Any]:
    """Return a reader that also reads `exact`, as the given value."""
    return lambda text: exact if text == "exact" else reader(text)


def _to_notation(value: Any) -> str:
    """Return a field's value in the notation."""
    if value == LOSSLESS_RAMP:
        return "exact"
    if isinstance(value, tuple) and value and isinstance(value[0], str):
        return "+".join(value)
    if isinstance(value, tuple):
        return f"{value[0]:g}" if value[0] == value[1] else f"{value[0]:g}->{value[1]:g}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _read_names(text: str) -> tuple[str, ...]:
    """Read names joined by +."""
    names = tuple(name.strip() for name in text.split("+"))
    if not all(names):
        raise ValueError
    return names


_read_bits = _one_of(GRIDS, float)
_FRACTIONS, _BITS = "fractions from 0 to 1", ", ".join(map(str, GRIDS))
_BITS_RAMP = _ramp(_read_bits)
_BITS_OR_EXACT = f"{_BITS}, two of them as 4->2, and exact"
_READERS = {
    "warmup": (_read_count, "numbers of steps from 0"),
    "first": (_or_exact(_read_bits), f"{_BITS}, and exact"),
    "refresh": (_read_count, "numbers of steps from 1, and 0 for never"),
    "cached": (_ramp(_read_fraction), f"{_FRACTIONS}, or two of them as 0->0.5"),
    **dict.fromkeys(("bits", "bits_o"), (_or_exact(_BITS_RAMP), _BITS_OR_EXACT)),
    **dict.fromkeys(("bits_q", "bits_k", "bits_v"), (_or_exact(_BITS_RAMP, LOSSLESS_RAMP), _BITS_OR_EXACT)),
    "score": (_one_of(SCORES), ", ".join(SCORES)),
    "predictor": (lambda text: text if text == ADAPTIVE else _read_fraction(text), f"{_FRACTIONS}, and {ADAPTIVE}"),
    "joint": (_read_weight, f"weights from 0 to {MAX_JOINT}"),
    "exact": (_read_names, "prefixes of layer names, joined by +"),
}
"""Reader of each key's value, and its valid values in words."""
_BESIDE_FILES = ("warmup", "first", "refresh", "predictor", "joint", "exact")
"""Keys that may follow a file."""

PAPER = CodecSchedule(warmup=2, refresh=10, cached=(0.0, 1.0), score=CHANGE)
"""V-Major as in the paper: tokens of V that have changed most since the step before are sent, fewer at each step."""
BALANCED = CodecSchedule(
    warmup=1,
    first=8,
    bits=(2, 2),
    bits_q=(1.6, 1.6),
    bits_v=(1.6, 1.6),
    bits_o=(2.7, 2.7),
    predictor=ADAPTIVE,
    joint=1.0,
)
"""Mode `balanced`. Errors in K affect the image more than those in V; by heads, those in O most. Bits are constant:
FLUX.1 is most sensitive at the first steps, FLUX.2 and Wan at the last ones."""
BALANCED_FEW = CodecSchedule(warmup=1, first=8, bits=(2.7, 2.7), bits_o=(4, 4), predictor=0.5, joint=1.0)
"""Mode `balanced` for few steps, between which an estimated gain does not hold."""
BALANCED_VERY_FEW = replace(BALANCED_FEW, bits_k=(4, 4))
"""Mode `balanced` for very few steps."""
BALANCED_FEW_GUIDED = replace(BALANCED_FEW, bits=(4, 4), bits_v=(2.7, 2.7), predictor=ADAPTIVE)
"""Mode `balanced` for few steps with guidance. Estimated gains do hold for differences between branches."""
BALANCED_VERY_FEW_GUIDED = replace(BALANCED_FEW, bits=(4, 4), bits_o=(8, 8))
"""Mode `balanced` for very few steps with guidance."""
FAST = CodecSchedule(warmup=1, first=4, cached=(0.5, 0.5), bits=(2, 2), bits_o=(2.7, 2.7), predictor=0.5, joint=1.0)
"""Mode `fast` up to USUAL_STEPS."""
FAST_MANY = replace(FAST, first=8, cached=(0.6, 0.6), bits_o=(1.6, 1.6))
"""Mode `fast` for many steps, between which values change less."""
FAST_FEW = CodecSchedule(warmup=1, first=4, bits=(2, 2), bits_q=(1.6, 1.6), bits_o=(2.7, 2.7), predictor=0.5, joint=1.0)
"""Mode `fast` for few steps."""
FAST_FEW_GUIDED = replace(FAST_FEW, bits_q=None, bits_k=(2.7, 2.7), bits_o=(4, 4), predictor=ADAPTIVE)
"""Mode `fast` for few steps with guidance."""
FAST_VERY_FEW_GUIDED = replace(FAST_FEW, bits=(4, 4), bits_q=None, bits_v=(2.7, 2.7), bits_o=(4, 4))
"""Mode `fast` for very few steps with guidance."""
DEFAULT_STEPS = 50
"""Number of steps that is assumed for runs of unknown length."""
FEW_STEPS = 12
"""Maximum number of steps of a run whose values change too much between steps for few bits."""
VERY_FEW_STEPS = 5
"""Maximum number of steps of a run that needs even more bits."""
USUAL_STEPS = 32
"""Maximum number of steps of a run of `fast` that sends half of the tokens."""
_ALWAYS = math.inf
_PRESETS: dict[tuple[str, bool], tuple[tuple[float, CodecSchedule], ...]] = {
    ("balanced", False): ((VERY_FEW_STEPS, BALANCED_VERY_FEW), (FEW_STEPS, BALANCED_FEW), (_ALWAYS, BALANCED)),
    ("balanced", True): (
        (VERY_FEW_STEPS, BALANCED_VERY_FEW_GUIDED),
        (FEW_STEPS, BALANCED_FEW_GUIDED),
        (_ALWAYS, BALANCED),
    ),
    ("fast", False): ((FEW_STEPS, FAST_FEW), (USUAL_STEPS, FAST), (_ALWAYS, FAST_MANY)),
    ("fast", True): (
        (VERY_FEW_STEPS, FAST_VERY_FEW_GUIDED),
        (FEW_STEPS, FAST_FEW_GUIDED),
        (USUAL_STEPS, FAST),
        (_ALWAYS, FAST_MANY),
    ),
}
"""Schedules by mode and by whether several branches of guidance are denoised; each up to a number of steps. Those with
and without guidance have the same keyframe, since ranks that run all branches know of them only after it."""


def preset(mode: str, total: int | None, is_guided: bool = False) -> CodecSchedule | None:
    """Return the schedule of a mode, or None for lossless modes.

    Args:
        mode: one of options.MODES.
        total: number of steps of the run; None if unknown.
        is_guided: whether each step has several branches of classifier-free guidance. Guidance amplifies errors that
            differ between them.
    """
    if mode == "paper":
        return PAPER
    name = "balanced" if mode == "auto" else mode  # the lowest precision of `auto`, see :mod:`precisions`
    steps = total or DEFAULT_STEPS
    return next((schedule for most, schedule in _PRESETS.get((name, is_guided), ()) if steps <= most), None)
