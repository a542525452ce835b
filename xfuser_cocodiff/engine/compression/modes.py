"""Modes: by which codecs the steps of a run travel."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from xfuser_cocodiff.engine.compression import bit_allocation
from xfuser_cocodiff.engine.compression.bit_allocation import LETTERS, NOT_SENT, BitAllocation
from xfuser_cocodiff.engine.compression.codecs import (
    ADAPTIVE,
    CHANGE,
    CHOOSING,
    DRIFT,
    EXACT,
    SCORES,
    TOKENS,
    Codec,
    aligned,
    section_bytes,
)
from xfuser_cocodiff.engine.kernels.quantize import GRIDS

NOTATION = (
    "'warmup=2,first=8,refresh=10,cached=0->0.5,bits=4->2,bits_q=1.6,bits_o=2,score=drift,predictor=auto,"
    "exact=blocks.0+blocks.1', or some of these, perhaps behind '@FILE,'"
)
Pair = tuple[float, float]
"""At the first step and at the last one."""


@dataclass(frozen=True)
class CodecSchedule:
    """Codecs over a run. A pair is a value at its first step and one at its last, with a straight line between. A run
    of unknown length goes as one of 50 steps, and stays at the last value after these."""

    warmup: int = 1
    """Steps at the start that owe nothing to others."""
    first: float | None = None
    """Bits per value in these; they travel exactly where there are none."""
    refresh: int = 0
    """Every so many steps one travels exactly; 0 stands for never."""
    cached: Pair = (0.0, 0.0)
    """Share of tokens that are not sent."""
    bits: Pair | None = None
    """Per value of Q, K and V; values themselves are sent where there are none. A change falls half way."""
    bits_q: Pair | None = None
    """Of Q alone, where they differ; the same of K and of V."""
    bits_k: Pair | None = None
    bits_v: Pair | None = None
    bits_o: Pair | None = None
    """Of O, of which all tokens are sent."""
    score: str = DRIFT
    predictor: float | str = 0.0
    exact: tuple[str, ...] = ()
    """Layers that always travel exactly, by the beginning of their names."""
    allocation: BitAllocation | None = None
    """In the place of all `bits`."""

    def is_keyframe_step(self, step: int) -> bool:
        """Whether a step, counted from 0, owes nothing to those before it: it is to travel exactly, or as the first."""
        since = step - self.warmup
        return since < 0 or bool(self.refresh and since % self.refresh == self.refresh - 1)

    @property
    def keyframe_codec(self) -> Codec:
        """That of the first steps, and of what has no reference later on."""
        return Codec(self.first, predictor=self.predictor, is_keyframe=self.first is not None)

    def codecs(self, step: int, total: int | None, layer: str | None = None) -> Mapping[str, Codec]:
        """Codecs of Q, K, V and O at a step.

        Args:
            step: counted from 0.
            total: steps of the run; None where that is not known.
            layer: its name; None stands for most of them.
        """
        if self.is_keyframe_step(step):
            exact = replace(EXACT, predictor=self.predictor)
            return dict.fromkeys(LETTERS, self.keyframe_codec if step < self.warmup else exact)
        done = min(1.0, step / max(1, (total or _USUAL_STEPS) - 1))
        share = min(1.0, max(0.0, 1 - (self.cached[0] + done * (self.cached[1] - self.cached[0]))))
        if self.allocation:
            allotted = self.allocation.bits(layer, done)
            return {
                name: Codec(bits or None, share=0.0 if bits == NOT_SENT else 1.0, predictor=self.predictor)
                for name, bits in allotted.items()
            }
        of = {"q": self.bits_q or self.bits, "k": self.bits_k or self.bits, "v": self.bits_v or self.bits}
        found = {name: Codec(_half_way(pair, done), share, self.score, self.predictor) for name, pair in of.items()}
        o = Codec(_half_way(self.bits_o, done), predictor=self.predictor if self.bits_o else 0.0)
        return {**found, "o": o}

    def sent_bytes(self, names: str, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, total: int) -> list[int]:
        """Bytes of a link for an exchange, at every step of a run in which all values are finite.

        Args:
            names: of its tensors, letters of "qkvo".
            shapes: (L, G, H, T, D) of each, as codecs have them.
            dtype: of their values.
            total: steps of the run.
        """
        return [link_bytes(self.codecs(step, total), names, shapes, dtype) for step in range(total)]

    def leaves_out(self, layer: str) -> bool:
        """Whether a layer always travels exactly."""
        return any(_begins(layer, name) for name in self.exact)

    def unmatched(self, layers: Iterable[str]) -> list[str]:
        """Names in `exact` with which none of the layers begins: they were mistaken.

        Args:
            layers: all that there are.
        """
        known = list(layers)
        return [name for name in self.exact if not any(_begins(layer, name) for layer in known)]

    @classmethod
    def parse(cls, text: str, base: "CodecSchedule") -> "CodecSchedule":
        """Read changes to a schedule.

        Raises:
            ValueError: not the notation, or values that no schedule has.
        """
        if text.startswith("@"):
            file, _, text = text.partition(",")
            base = cls.of(bit_allocation.read(file))
            if not text:
                return base
        found: dict[str, Any] = {}
        for pair in text.split(","):
            name, _, value = (part.strip() for part in pair.partition("="))
            if name not in _READERS:
                raise ValueError(f"{text!r} names {name!r}; valid are {NOTATION}")
            if base.allocation and name not in _BESIDE_FILES:
                raise ValueError(
                    f"{text!r} names {name!r}, which has no effect beside a file; valid are {', '.join(_BESIDE_FILES)}"
                )
            if name in found:
                raise ValueError(f"{text!r} names {name!r} twice; valid is once")
            read, valid = _READERS[name]
            try:
                found[name] = read(value)
            except ValueError:
                raise ValueError(f"{text!r}: {value!r} is not valid for {name}; valid are {valid}") from None
        if "bits" in found:  # of all three, as far as they have none of their own
            base = replace(base, bits_q=None, bits_k=None, bits_v=None)
        return replace(base, **found)

    @classmethod
    def of(cls, allotted: BitAllocation) -> "CodecSchedule":
        """By which a run goes that has such bits."""
        return cls(first=allotted.first, predictor=allotted.predictor, allocation=allotted)

    def __str__(self) -> str:
        if self.allocation:
            return self.allocation.source
        default = CodecSchedule()
        changed = [field.name for field in fields(self) if getattr(self, field.name) != getattr(default, field.name)]
        return ",".join(f"{name}={_written(getattr(self, name))}" for name in changed) or "exact"


def link_bytes(codecs: Mapping[str, Codec], names: str, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> int:
    """Bytes of a link for an exchange at one step: a flag, the choices of tokens, and values; see :mod:`exchange`."""
    like, size = dict(zip(names, shapes, strict=True)), aligned(1)
    for name, shape in like.items():
        codec = codecs[name]
        if codec.chooses and name not in CHOOSING and shape[TOKENS] != like["v"][TOKENS]:
            codec = replace(codec, share=1.0)  # V's choice says nothing of its tokens
        size += sum(map(aligned, section_bytes(codec, name, shape, dtype)))
    return size


def _begins(layer: str, name: str) -> bool:
    return layer == name or layer.startswith(f"{name}.")


def _half_way(pair: Pair | None, done: float) -> float | None:
    return pair and pair[done >= 0.5]


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise ValueError
    return int(text)


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError
    return value


def _one_of(valid: Collection, convert: Callable[[str], Any] = str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        if (value := convert(text)) not in valid:
            raise ValueError
        return value

    return read


def _pair(reader: Any) -> Any:
    def read(text: str) -> tuple:
        first, arrow, last = text.partition("->")
        return reader(first), reader(last if arrow else first)

    return read


def _written(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], str):
        return "+".join(value)
    if isinstance(value, tuple):
        return f"{value[0]:g}" if value[0] == value[1] else f"{value[0]:g}->{value[1]:g}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split("+"))
    if not all(names):
        raise ValueError
    return names


_bits = _one_of(GRIDS, float)
_SHARES, _BITS = "shares from 0 to 1", ", ".join(map(str, GRIDS))
_PAIR_OF_BITS = _pair(_bits), f"{_BITS}, or two of them as 4->2"
_READERS = {
    "warmup": (_whole, "numbers of steps from 0"),
    "first": (lambda text: None if text == "exact" else _bits(text), f"{_BITS}, and exact"),
    "refresh": (_whole, "numbers of steps from 1, and 0 for never"),
    "cached": (_pair(_share), f"{_SHARES}, or two of them as 0->0.5"),
    **dict.fromkeys(("bits", "bits_q", "bits_k", "bits_v", "bits_o"), _PAIR_OF_BITS),
    "score": (_one_of(SCORES), ", ".join(SCORES)),
    "predictor": (lambda text: text if text == ADAPTIVE else _share(text), f"{_SHARES}, and {ADAPTIVE}"),
    "exact": (_names, "beginnings of layers' names, joined by +"),
}
"""For each name what reads its value, and what is valid."""
_BESIDE_FILES = ("warmup", "first", "refresh", "predictor", "exact")

PAPER = CodecSchedule(warmup=2, refresh=10, cached=(0.0, 1.0), score=CHANGE)
"""V-Major as the paper has it: what of V has changed since the step before is sent, and less so from step to step."""
BALANCED = CodecSchedule(warmup=1, first=8, bits=(2, 2), bits_q=(1.6, 1.6), bits_o=(2.7, 2.7), predictor=ADAPTIVE)
"""Errors in Q show least, and those in O most. When they show most depends on the model: in FLUX.1 at the first steps,
in FLUX.2 and Wan at the last ones; so bits stay the same."""
BALANCED_FEW = CodecSchedule(warmup=1, first=8, bits=(4, 4), bits_q=(2.7, 2.7), bits_o=(4, 4), predictor=0.5)
"""What comes again of a change is another share at each step of so few."""
FAST = CodecSchedule(warmup=1, first=8, cached=(0.6, 0.6), bits=(2, 2), bits_o=(1.6, 1.6), predictor=0.5)
FAST_FEW = CodecSchedule(warmup=1, first=8, bits=(2, 2), bits_q=(1.6, 1.6), bits_o=(2.7, 2.7), predictor=0.5)
_USUAL_STEPS = 50
FEW_STEPS = 12
"""Up to so many steps, values change too much between two of them for few bits."""


def preset(mode: str, total: int | None) -> CodecSchedule | None:
    """The schedule of a mode for a run of so many steps; None for the one that is exact."""
    few = total is not None and total <= FEW_STEPS
    if mode == "balanced":
        return BALANCED_FEW if few else BALANCED
    if mode == "fast":
        return FAST_FEW if few else FAST
    return PAPER if mode == "paper" else None
