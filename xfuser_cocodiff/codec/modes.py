"""Modes: by which codecs the steps of a run travel."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from xfuser_cocodiff.codec.codecs import CHANGE, CHOOSING, DRIFT, EXACT, SCORES, TOKENS, Codec, aligned, section_bytes
from xfuser_cocodiff.kernels.quantise import STEPS

NOTATION = (
    "'warmup=2,refresh=10,cached=0->0.5,bits=4->2,bits_o=2,score=drift,predictor=0.5,exact=blocks.0+blocks.1', or some "
    "of these"
)


@dataclass(frozen=True)
class CodecSchedule:
    """Codecs over a run. A pair is a value at its first step and one at its last, with a straight line between. A run
    of unknown length goes as one of 50 steps, and stays at the last value after these."""

    warmup: int = 1
    """Steps at the start that travel exactly."""
    refresh: int = 0
    """Every so many steps one travels exactly; 0 stands for never."""
    cached: tuple[float, float] = (0.0, 0.0)
    """Share of tokens that are not sent."""
    bits: tuple[int, int] | None = None
    """Per value of Q, K and V; values themselves are sent where there are none. A change falls half way."""
    bits_o: tuple[int, int] | None = None
    """The same for O, of which all tokens are sent."""
    score: str = DRIFT
    predictor: float = 0.0
    exact: tuple[str, ...] = ()
    """Layers that always travel exactly, by the beginning of their names."""

    def is_refresh(self, step: int) -> bool:
        """Whether a step, counted from 0, is to travel exactly."""
        since = step - self.warmup
        return since < 0 or bool(self.refresh and since % self.refresh == self.refresh - 1)

    def codecs(self, step: int, total: int | None) -> Mapping[str, Codec]:
        """Codecs of Q, K, V and O at a step.

        Args:
            step: counted from 0.
            total: steps of the run; None where that is not known.
        """
        if self.is_refresh(step):
            return dict.fromkeys("qkvo", replace(EXACT, predictor=self.predictor))
        done = min(1.0, step / max(1, (total or _USUAL_STEPS) - 1))
        share = 1 - (self.cached[0] + done * (self.cached[1] - self.cached[0]))
        qkv = Codec(_half_way(self.bits, done), min(1.0, max(0.0, share)), self.score, self.predictor)
        o = Codec(_half_way(self.bits_o, done), predictor=self.predictor if self.bits_o else 0.0)
        return {"q": qkv, "k": qkv, "v": qkv, "o": o}

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
    def parse(cls, text: str, usual: "CodecSchedule") -> "CodecSchedule":
        """Read changes to a schedule.

        Raises:
            ValueError: not the notation, or values that no schedule has.
        """
        found: dict[str, Any] = {}
        for pair in text.split(","):
            name, _, value = (part.strip() for part in pair.partition("="))
            if name not in _READERS:
                raise ValueError(f"{text!r} names {name!r}; valid are {NOTATION}")
            if name in found:
                raise ValueError(f"{text!r} names {name!r} twice; valid is once")
            read, valid = _READERS[name]
            try:
                found[name] = read(value)
            except ValueError:
                raise ValueError(f"{text!r}: {value!r} is not valid for {name}; valid are {valid}") from None
        return replace(usual, **found)

    def __str__(self) -> str:
        usual = CodecSchedule()
        changed = [field.name for field in fields(self) if getattr(self, field.name) != getattr(usual, field.name)]
        return ",".join(f"{name}={_written(getattr(self, name))}" for name in changed) or "exact"


def link_bytes(codecs: Mapping[str, Codec], names: str, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> int:
    """Bytes of a link for an exchange at one step: a flag, the choices of tokens, and values; see :mod:`exchange`."""
    like, size = dict(zip(names, shapes, strict=True)), aligned(1)
    for name, shape in like.items():
        codec = codecs[name]
        if codec.share < 1 and name not in CHOOSING and shape[TOKENS] != like["v"][TOKENS]:
            codec = replace(codec, share=1.0)  # V's choice says nothing of its tokens
        size += sum(map(aligned, section_bytes(codec, name, shape, dtype)))
    return size


def _begins(layer: str, name: str) -> bool:
    return layer == name or layer.startswith(f"{name}.")


def _half_way(pair: tuple[int, int] | None, done: float) -> int | None:
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


def _bits(text: str) -> int:
    value = _whole(text)
    if value not in STEPS:
        raise ValueError
    return value


def _score(text: str) -> str:
    if text not in SCORES:
        raise ValueError
    return text


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


_SHARES, _BITS = "shares from 0 to 1", ", ".join(map(str, STEPS))
_READERS = {
    "warmup": (_whole, "numbers of steps from 0"),
    "refresh": (_whole, "numbers of steps from 1, and 0 for never"),
    "cached": (_pair(_share), f"{_SHARES}, or two of them as 0->0.5"),
    "bits": (_pair(_bits), f"{_BITS}, or two of them as 4->2"),
    "bits_o": (_pair(_bits), f"{_BITS}, or two of them as 4->2"),
    "score": (_score, ", ".join(SCORES)),
    "predictor": (_share, _SHARES),
    "exact": (_names, "beginnings of layers' names, joined by +"),
}
"""For each name what reads its value, and what is valid."""

PAPER = CodecSchedule(warmup=2, refresh=10, cached=(0.0, 1.0), score=CHANGE)
"""V-Major as the paper has it: what of V has changed since the step before is sent, and less so from step to step."""
BALANCED = CodecSchedule(warmup=1, bits=(2, 2), bits_o=(2, 2), predictor=0.5)
FAST = CodecSchedule(warmup=1, cached=(0.6, 0.6), bits=(2, 2), bits_o=(1, 1), predictor=0.5)
_USUAL_STEPS = 50
FEW_STEPS = 12
"""Up to so many steps, values change too much between two of them for few bits."""
QUALITY = {
    "balanced": ("53.8 dB at 50 steps", "55.6 dB at 8 steps"),
    "fast": ("46.4 dB at 50 steps", "45.6 dB at 8 steps"),
    "paper": ("45.7 dB at 50 steps", "35.3 dB at 8 steps"),
}
"""What to expect of modes, in runs of many steps and of few: `cocodiff quality` on the small trained model, 16 seeds,
bf16, to the exact picture."""


def quality(mode: str, total: int | None) -> str:
    """What to expect of a mode in a run of so many steps, in words."""
    return f"{QUALITY[mode][_are_few(total)]} to the exact picture in a small model"


def usual(mode: str, total: int | None) -> CodecSchedule | None:
    """The schedule of a mode for a run of so many steps; None for the one that is exact."""
    few = _are_few(total)
    if mode == "balanced":
        return replace(BALANCED, bits=(4, 4), bits_o=(4, 4)) if few else BALANCED
    if mode == "fast":
        return replace(FAST, cached=(0.0, 0.0), bits_o=(2, 2)) if few else FAST
    return PAPER if mode == "paper" else None


def _are_few(total: int | None) -> bool:
    return total is not None and total <= FEW_STEPS
