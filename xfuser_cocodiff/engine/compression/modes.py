"""Modes: how the values of a run are coded over its steps, and the notation that changes it."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from xfuser_cocodiff.engine.codec.codec import EXACT, LETTERS, Codec
from xfuser_cocodiff.engine.codec.quantize import GRIDS

NOTATION = (
    "'error=0.05' or 'bits=2', 'warmup=2,first=8,predictor=1,joint=1', in the mode paper "
    "'warmup=2,refresh=10,cached=0->0.5', any subset of these"
)
MOST_ERROR = 1.0
"""Largest target of the error, at which as much is lost as is sent."""
Ramp = tuple[float, float]
"""Values at the first and the last step."""


@dataclass(frozen=True)
class CodecSchedule:
    """Codecs over the steps of a run. Fields are named as in the notation of `--cocodiff_schedule`."""

    warmup: int = 1
    """Number of keyframe steps at the start."""
    first: float | None = None
    """Bits per value at these; None sends them losslessly."""
    error: float | None = None
    """Mean error at which :mod:`rate_control` keeps a run by its choice of bits; None for `bits` at all steps."""
    bits: float | None = None
    """Bits per value of all tensors; None sends the values themselves, unless there is an `error`."""
    predictor: float = 0.0
    """1 to extrapolate references, see :attr:`Codec.predicts`; 0 to predict the references themselves."""
    joint: float = 0.0
    """1 to code other branches of guidance as differences to the leading one; 0 to code each by itself, see
    :mod:`coded_tensor`."""
    cached: Ramp | None = None
    """Fraction of tokens of Q, K and V that V-Major does not send, interpolated linearly; None sends all."""
    refresh: int = 0
    """Interval of V-Major's lossless steps; 0 for none."""

    def is_keyframe_step(self, step: int) -> bool:
        """Return whether a step, counted from 0, uses no references of earlier steps."""
        since_warmup = step - self.warmup
        return since_warmup < 0 or bool(self.refresh and since_warmup % self.refresh == self.refresh - 1)

    @property
    def keyframe_codec(self) -> Codec:
        """Codec of the warmup steps, and of tensors without a reference at later steps."""
        return Codec(self.first, predicts=bool(self.predictor), is_keyframe=self.first is not None)

    def codecs(self, step: int, total: int | None, bits: float | None = None) -> Mapping[str, Codec]:
        """Return the codecs of Q, K, V and O at a step.

        Args:
            step: step, counted from 0.
            total: number of steps; None if unknown, for V-Major then DEFAULT_STEPS.
            bits: bits per value that rate control has chosen; None for those of the schedule.
        """
        if self.is_keyframe_step(step):
            return dict.fromkeys(LETTERS, self.keyframe_codec if step < self.warmup else EXACT)
        codec = Codec(self.bits if bits is None else bits, predicts=bool(self.predictor))
        if self.cached is None:
            return dict.fromkeys(LETTERS, codec)
        progress = min(1.0, step / max(1, (total or DEFAULT_STEPS) - 1))
        cached = self.cached[0] + progress * (self.cached[1] - self.cached[0])
        selecting = replace(codec, token_fraction=min(1.0, max(0.0, 1 - cached)))
        return {**dict.fromkeys("qkv", selecting), "o": EXACT}

    @classmethod
    def parse(cls, text: str, base: "CodecSchedule") -> "CodecSchedule":
        """Return a schedule with changes in the notation of `--cocodiff_schedule`.

        Args:
            text: the changes, see NOTATION.
            base: schedule to change.

        Raises:
            ValueError: the text is not in the notation, or has values that no schedule has.
        """
        found: dict[str, Any] = {}
        readers = _READERS if base.cached is None else _READERS_OF_V_MAJOR
        for pair in text.split(","):
            name, _, value = (part.strip() for part in pair.partition("="))
            if name in _REMOVED:
                raise ValueError(f"{text!r} has {name!r}, which no longer exists; {_REMOVED[name]}")
            if name not in readers:
                raise ValueError(f"{text!r} has the unknown key {name!r}; valid are {', '.join(readers)}: {NOTATION}")
            if name in found:
                raise ValueError(f"{text!r} has {name!r} twice; valid is once")
            read, valid = readers[name]
            try:
                found[name] = read(value)
            except ValueError:
                raise ValueError(f"{text!r}: {value!r} is not valid for {name}; valid are {valid}") from None
        if "bits" in found and "error" in found:
            raise ValueError(f"{text!r} has 'bits' and 'error'; valid is one of them, since bits follow from an error")
        if "bits" in found:
            base = replace(base, error=None)
        return replace(base, **found)

    def __str__(self) -> str:
        default = CodecSchedule()
        changed = [field.name for field in fields(self) if getattr(self, field.name) != getattr(default, field.name)]
        return ",".join(f"{name}={_to_notation(getattr(self, name))}" for name in changed) or "exact"


def _read_count(text: str) -> int:
    """Read a non-negative integer."""
    if not text.isdecimal():
        raise ValueError
    return int(text)


def _read_fraction(text: str) -> float:
    """Read a number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError
    return value


def read_error(text: str) -> float:
    """Read a target of the error.

    Raises:
        ValueError: it is no number above 0, up to MOST_ERROR.
    """
    value = float(text)
    if not 0 < value <= MOST_ERROR:
        raise ValueError
    return value


def _read_ramp(text: str) -> Ramp:
    """Read a ramp, such as 0->0.5, or a constant."""
    first, arrow, last = text.partition("->")
    return _read_fraction(first), _read_fraction(last if arrow else first)


def _one_of(valid: Collection, convert: Callable[[str], Any] = str) -> Callable[[str], Any]:
    """Return a reader of one of the valid values."""

    def read(text: str) -> Any:
        if (value := convert(text)) not in valid:
            raise ValueError
        return value

    return read


def _or_exact(reader: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a reader that also reads `exact`, as None."""
    return lambda text: None if text == "exact" else reader(text)


def _to_notation(value: Any) -> str:
    """Return a field's value in the notation."""
    if isinstance(value, tuple):
        return f"{value[0]:g}" if value[0] == value[1] else f"{value[0]:g}->{value[1]:g}"
    return f"{value:g}" if isinstance(value, float) else str(value)


_FRACTIONS, ERRORS = "fractions from 0 to 1", f"numbers above 0, up to {MOST_ERROR:g}"
_BITS = _or_exact(_one_of(GRIDS, float)), f"{', '.join(map(str, GRIDS))}, and exact"
_WARMUP = _read_count, "numbers of steps from 0"
_READERS = {
    "error": (read_error, ERRORS),
    "bits": _BITS,
    "warmup": _WARMUP,
    "first": _BITS,
    **dict.fromkeys(("predictor", "joint"), (_one_of((0.0, 1.0), float), "0 and 1")),
}
"""Reader of each key's value, and its valid values in words."""
_READERS_OF_V_MAJOR = {
    "warmup": _WARMUP,
    "refresh": (_read_count, "numbers of steps from 1, and 0 for never"),
    "cached": (_read_ramp, f"{_FRACTIONS}, or two of them as 0->0.5"),
}
"""The same for the mode `paper`."""
_REMOVED = {
    **dict.fromkeys(("bits_q", "bits_k", "bits_v", "bits_o"), "use bits for all tensors, or error"),
    "score": "tokens are selected by their change since the last step",
    "exact": "set a smaller error",
}
"""Keys of version 0.2, and what to use."""

PAPER = CodecSchedule(warmup=2, refresh=10, cached=(0.0, 1.0))
"""V-Major as in the paper: tokens of V that have changed most since the step before are sent, fewer at each step."""
BALANCED = CodecSchedule(first=8, error=0.026, predictor=1.0, joint=1.0)
"""Mode `balanced`: the error of FP8 (e4m3), as other systems send it."""
FAST = replace(BALANCED, error=0.09)
"""Mode `fast`: the error of FP4 with a scale for 16 values."""
DEFAULT_STEPS = 50
"""Number of steps that is assumed for runs of unknown length."""
PRESETS = {"paper": PAPER, "balanced": BALANCED, "fast": FAST}
"""Schedules of the lossy modes."""


def schedule_of(mode: str, overrides: str | None) -> CodecSchedule:
    """Return the schedule of a mode, with changes in the notation of `--cocodiff_schedule`."""
    preset = PRESETS.get(mode, CodecSchedule())
    return CodecSchedule.parse(overrides, preset) if overrides else preset
