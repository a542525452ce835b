"""Bit allocations: bits per value by layer, tensor and phase, in the schedule files that `cocodiff tune` writes."""

import functools
import itertools
import math
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xfuser_cocodiff.engine.compression.link_reference import ADAPTIVE
from xfuser_cocodiff.engine.kernels.quantize import GRIDS
from xfuser_cocodiff.engine.topology import json_file

FORMAT = "cocodiff schedule 1"
"""Value of `format` in a schedule file."""
LETTERS = "qkvo"
"""Letters of the tensors."""
MAX_JOINT = 2
"""Largest weight of the leading branch of guidance."""
NOT_SENT = 0.0
"""Bits of tensors that are not sent: receivers keep their prediction."""
Bits = float | None
"""Bits per value; None sends the values themselves."""


@dataclass(frozen=True)
class BitAllocation:
    """Bits per value by layer, tensor and phase of a run."""

    starts: tuple[float, ...]
    """Start of each phase as a fraction of the run; the first is 0."""
    layers: Mapping[str, Mapping[str, tuple[Bits, ...]]]
    """Bits of each phase, by the layer's name and the tensor's letter."""
    first: Bits = None
    """Bits at the first step, which is a keyframe."""
    predictor: float | str = 0.0
    """Gain of the prediction, see :attr:`Codec.predictor`."""
    steps: int = 50
    """Number of steps of the runs that were tuned; phases take the same fractions of other runs."""
    model: str | None = None
    """Model that was tuned; None for any model with these layers."""
    source: str = ""
    """Where the allocation comes from, in words."""
    joint: float | None = None
    """Weight of the leading branch of guidance, see :attr:`CodecSchedule.joint`; None for the mode's."""

    def bits(self, layer: str | None, progress: float) -> dict[str, Bits]:
        """Return the bits of Q, K, V and O.

        Args:
            layer: name of a layer, one of `layers`; None for the bits that most layers have.
            progress: fraction of the run, from 0 to 1.
        """
        phase = sum(progress >= start for start in self.starts) - 1
        of_layers = [self.layers[layer]] if layer is not None else list(self.layers.values())
        return {letter: Counter(of[letter][phase] for of in of_layers).most_common(1)[0][0] for letter in LETTERS}

    def check_model(self, model: str) -> None:
        """Check that a model, by name or folder, is the one that was tuned.

        Raises:
            ValueError: another model was tuned.
        """
        if self.model and Path(model).name != Path(self.model).name:
            raise ValueError(
                f"{self.source} was tuned to {self.model!r}, not to {model!r}; run cocodiff tune for this model, or "
                'set "model": null in the file to use it with any model that has its layers'
            )

    def check_layer(self, layer: str) -> None:
        """Check that a layer has bits.

        Raises:
            ValueError: it has none.
        """
        if layer not in self.layers:
            layers = list(self.layers)
            raise ValueError(
                f"{self.source} has no bits for the layer {layer!r}: it was tuned to {self.model or 'a model'} "
                f"with {len(layers)} layers, such as {layers[0]!r}; run cocodiff tune for this model"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the content of a schedule file, with an entry for each layer, tensor and phase."""
        schedule = [
            {"layer": layer, "tensor": letter, "steps": [*steps], "codec": _codec_name(bits)}
            for layer, of_tensors in self.layers.items()
            for letter in LETTERS
            for steps, bits in zip(self.phase_steps, of_tensors[letter], strict=True)
        ]
        return {
            "format": FORMAT,
            "model": self.model,
            "layers": [*self.layers],
            "steps": self.steps,
            "starts": [*self.starts],
            "first": _codec_name(self.first),
            "predictor": self.predictor,
            "joint": self.joint,
            "schedule": schedule,
        }

    @property
    def phase_steps(self) -> list[tuple[int, int]]:
        """First and last step of each phase in a run of `steps` steps, counted from 0."""
        edges = [*(math.ceil(start * (self.steps - 1)) for start in self.starts), self.steps]
        return [(first, following - 1) for first, following in itertools.pairwise(edges)]


def read(text: str) -> BitAllocation:
    """Read a schedule file.

    Args:
        text: `@FILE`, or `@FILE#CHECKSUM` as :func:`with_checksum` returns it.

    Raises:
        ValueError: the file does not exist, is no schedule, or does not match the checksum.
    """
    return _read_cached(text) if "#" in text else _read(text)


@functools.cache
def _read_cached(text: str) -> BitAllocation:
    """Read a schedule file once per checksum."""
    return _read(text)


def _read(text: str) -> BitAllocation:
    path, _, checksum = text.removeprefix("@").partition("#")
    try:
        content = json_file.read_bytes(Path(path))
        record = json_file.parse(content)
    except (OSError, ValueError) as error:
        raise ValueError(f"{text!r} is not valid: {error}; valid is @FILE, written by cocodiff tune") from None
    if checksum and checksum != _checksum(content):
        raise ValueError(f"{path!r} has changed since the run began")
    try:
        return _from_json(record, f"the schedule {path!r}")
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, IndexError) as error:
        raise ValueError(
            f"{text!r} is not a valid schedule: {type(error).__name__} {error}; valid is @FILE, written by cocodiff "
            "tune"
        ) from None


def with_checksum(text: str) -> str:
    """Return `@FILE#CHECKSUM` for `@FILE`, which differs between ranks that would read different contents."""
    path = text.removeprefix("@").partition("#")[0]
    return f"@{path}#{_checksum(json_file.read_bytes(Path(path)))}"


def _checksum(content: bytes) -> str:
    return f"{zlib.crc32(content):08x}"


def _from_json(record: Any, source: str) -> BitAllocation:
    """Return the allocation of a schedule file's content.

    Raises:
        ValueError: another format, or phases, layers or codecs that do not fit each other.
        KeyError, TypeError, AttributeError: keys are missing, or have another type.
    """
    if record["format"] != FORMAT:
        raise ValueError(f"format {record['format']!r} instead of {FORMAT!r}")
    starts = tuple(float(start) for start in record["starts"])
    if not starts or starts[0] != 0 or list(starts) != sorted({*starts}) or starts[-1] >= 1:
        raise ValueError(f"phases start at {record['starts']}; they must ascend from 0 to below 1")
    by_step: dict[str, dict[str, list[tuple[int, Bits]]]] = {
        layer: {letter: [] for letter in LETTERS} for layer in record["layers"]
    }
    for entry in record["schedule"]:
        by_step[entry["layer"]][entry["tensor"]].append((entry["steps"][0], _bits_of(entry["codec"])))
    layers = {
        layer: {
            letter: tuple(bits for _, bits in sorted(entries, key=lambda entry: entry[0]))
            for letter, entries in of_tensors.items()
        }
        for layer, of_tensors in by_step.items()
    }
    if not layers or any(len(bits) != len(starts) for of_tensors in layers.values() for bits in of_tensors.values()):
        raise ValueError(f"{len(layers)} layers, some of them without bits for all {len(starts)} phases")
    first, predictor = _bits_of(record["first"]), record["predictor"]
    if predictor != ADAPTIVE and not (isinstance(predictor, (int, float)) and 0 <= predictor <= 1):
        raise ValueError(f"predictor {predictor!r}; it must be a fraction from 0 to 1, or {ADAPTIVE!r}")
    steps, model = int(record["steps"]), record["model"]
    if steps < 1:
        raise ValueError(f"steps {steps}; they must be at least 1")
    if not (model is None or isinstance(model, str)):
        raise ValueError(f"model {model!r}; it must be a name, or null")
    joint = record.get("joint")  # files of earlier versions have none
    if joint is not None and not 0 <= joint <= MAX_JOINT:
        raise ValueError(f"joint {joint}; it must be a weight from 0 to {MAX_JOINT}, or null")
    return BitAllocation(starts, layers, first, predictor, steps, model, source, joint)


_EXACT, _NOTHING = "exact", "nothing"
"""Names of codecs that send the values themselves, and nothing."""


def _codec_name(bits: Bits) -> str:
    """Return the name of a codec in a schedule file."""
    return _EXACT if bits is None else _NOTHING if bits == NOT_SENT else f"bits={bits:g}"


def _bits_of(codec: str) -> Bits:
    """Return the bits of a codec by its name.

    Raises:
        ValueError: there is no such codec.
    """
    if codec in (_EXACT, _NOTHING):
        return None if codec == _EXACT else NOT_SENT
    name, _, bits = codec.partition("=")
    if name != "bits" or float(bits) not in GRIDS:
        raise ValueError(f"unknown codec {codec!r}")
    return float(bits)
