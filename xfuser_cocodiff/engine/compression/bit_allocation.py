"""Bits that were allotted to the layers of a model, and the file that they come in; `cocodiff tune` writes it."""

import functools
import itertools
import json
import math
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xfuser_cocodiff.engine.kernels.quantize import GRIDS

FORMAT = "cocodiff schedule 1"
LETTERS = "qkvo"
NOT_SENT = 0.0
Bits = float | None
"""Per value; None sends values as they are, and NOTHING leaves what the receiver has."""


@dataclass(frozen=True)
class BitAllocation:
    """Bits by layer, tensor and phase of a run."""

    starts: tuple[float, ...]
    """Where phases begin, in parts of a run; the first at 0."""
    layers: Mapping[str, Mapping[str, tuple[Bits, ...]]]
    """By the layer's name and the tensor's letter: for each phase."""
    first: Bits = None
    """At the first step, which owes nothing to others."""
    predictor: float | str = 0.0
    steps: int = 50
    """Of the runs that it was tuned on; others have their phases in the same parts."""
    model: str | None = None
    """That it was tuned to; None goes with any that has these layers."""
    source: str = ""
    """Where it came from, as the flag has it."""

    def bits(self, layer: str | None, done: float) -> dict[str, Bits]:
        """Of Q, K, V and O.

        Args:
            layer: its name, one of `layers`; None stands for what most of them have.
            done: of the run, from 0 to 1.
        """
        phase = sum(done >= start for start in self.starts) - 1
        of = [self.layers[layer]] if layer is not None else list(self.layers.values())
        return {letter: Counter(one[letter][phase] for one in of).most_common(1)[0][0] for letter in LETTERS}

    def check_model(self, model: str) -> None:
        """Compare a model's name, or the path of its folder, with that which it was tuned to.

        Raises:
            ValueError: another one.
        """
        if self.model and Path(model).name != Path(self.model).name:
            raise ValueError(
                f"{self.source} was tuned to {self.model!r}, and this is {model!r}; cocodiff tune makes one for it, "
                'and one with "model": null goes with any model that has its layers'
            )

    def check_layer(self, layer: str) -> None:
        """Look for a layer.

        Raises:
            ValueError: nothing is known of it.
        """
        if layer not in self.layers:
            known = list(self.layers)
            raise ValueError(
                f"{self.source} has no bits for the layer {layer!r}: it was tuned to {self.model or 'a model'} "
                f"with {len(known)} layers, as {known[0]!r}; cocodiff tune makes one for this model"
            )

    def to_json(self) -> dict[str, Any]:
        """For a file: an entry for each layer, tensor and phase."""
        schedule = [
            {"layer": layer, "tensor": letter, "steps": [*span], "codec": _codec(bits)}
            for layer, of in self.layers.items()
            for letter in LETTERS
            for span, bits in zip(self.spans, of[letter], strict=True)
        ]
        return {
            "format": FORMAT,
            "model": self.model,
            "layers": [*self.layers],
            "steps": self.steps,
            "starts": [*self.starts],
            "first": _codec(self.first),
            "predictor": self.predictor,
            "schedule": schedule,
        }

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The first and the last step of each phase in runs of so many steps, counted from 0."""
        edges = [*(math.ceil(start * (self.steps - 1)) for start in self.starts), self.steps]
        return [(first, following - 1) for first, following in itertools.pairwise(edges)]


def read(text: str) -> BitAllocation:
    """Read the file that a flag names as `@FILE`, or as :func:`with_checksum` has it.

    Raises:
        ValueError: there is none, it is something else, or it has changed since it was signed.
    """
    return _read_cached(text) if "#" in text else _read(text)


@functools.cache
def _read_cached(text: str) -> BitAllocation:
    return _read(text)


def _read(text: str) -> BitAllocation:
    path, _, signature = text.removeprefix("@").partition("#")
    try:
        content = Path(path).read_bytes()
        given = json.loads(content)
    except (OSError, ValueError) as error:
        raise ValueError(f"{text!r} is not valid: {error}; valid is @FILE, which cocodiff tune has written") from None
    if signature and signature != _checksum(content):
        raise ValueError(f"{path!r} has changed since the run began")
    try:
        return _parsed(given, f"the schedule {path!r}")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{text!r} is not valid: it is no schedule, for {type(error).__name__} {error}; valid is @FILE, which "
            "cocodiff tune has written"
        ) from None


def with_checksum(text: str) -> str:
    """`@FILE` with what tells its contents from others, so that ranks which read different files see it."""
    path = text.removeprefix("@").partition("#")[0]
    return f"@{path}#{_checksum(Path(path).read_bytes())}"


def _checksum(content: bytes) -> str:
    return f"{zlib.crc32(content):08x}"


def _parsed(given: Any, source: str) -> BitAllocation:
    if given["format"] != FORMAT:
        raise ValueError(f"of the format {given['format']!r} instead of {FORMAT!r}")
    starts = tuple(float(start) for start in given["starts"])
    if not starts or starts[0] != 0 or list(starts) != sorted({*starts}) or starts[-1] >= 1:
        raise ValueError(f"of phases that begin at {given['starts']}")
    found: dict[str, dict[str, list[tuple[int, Bits]]]] = {
        layer: {letter: [] for letter in LETTERS} for layer in given["layers"]
    }
    for entry in given["schedule"]:
        found[entry["layer"]][entry["tensor"]].append((entry["steps"][0], _bits(entry["codec"])))
    layers = {
        layer: {
            letter: tuple(bits for _, bits in sorted(entries, key=lambda one: one[0])) for letter, entries in of.items()
        }
        for layer, of in found.items()
    }
    if not layers or any(len(bits) != len(starts) for of in layers.values() for bits in of.values()):
        raise ValueError(f"of {len(layers)} layers, not all with bits for {len(starts)} phases")
    first, predictor = _bits(given["first"]), given["predictor"]
    return BitAllocation(starts, layers, first, predictor, int(given["steps"]), given["model"], source)


_EXACT, _NOT_SENT = "exact", "nothing"


def _codec(bits: Bits) -> str:
    return _EXACT if bits is None else _NOT_SENT if bits == NOT_SENT else f"bits={bits:g}"


def _bits(codec: str) -> Bits:
    if codec in (_EXACT, _NOT_SENT):
        return None if codec == _EXACT else NOT_SENT
    name, _, bits = codec.partition("=")
    if name != "bits" or float(bits) not in GRIDS:
        raise ValueError(f"of the codec {codec!r}")
    return float(bits)
