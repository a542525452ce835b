"""Runs of a model by bits that are tried, which are remembered: a search that was broken off goes on where it was.

Those of the check are made anew, since their pictures are to be shown and are not kept.
"""

import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from xfuser_cocodiff.engine.compression.bit_allocation import BitAllocation
from xfuser_cocodiff.engine.settings.options import EXACT
from xfuser_cocodiff.lab.comparison.quality import DTYPES, CodecCase, GeneratedImages, QualityEvaluator, compare_images
from xfuser_cocodiff.lab.tuning.rate_distortion import EXACT_BITS


@dataclass(frozen=True)
class Trial:
    """What a run made."""

    psnr_db: tuple[float, ...]
    """To the exact pictures, of each."""
    ssim: float
    lpips: float | None
    step_fractions: tuple[float, ...]
    """Of the bytes that bfloat16 would take on slow axes, at each step; what is exact in float32 takes twice that."""

    @property
    def fraction(self) -> float:
        """Of the run."""
        return fmean(self.step_fractions)

    @property
    def later_fraction(self) -> float:
        """Of all steps but the first."""
        return fmean(self.step_fractions[1:])

    @property
    def decibels(self) -> float:
        """The mean, by which modes are judged."""
        return fmean(self.psnr_db)

    @property
    def error(self) -> float:
        """Mean square, as the mean of decibels has it."""
        return 10 ** (-self.decibels / 10)


class Trials:
    """Runs over the same prompts and seeds.

    Args:
        judge: of the model.
        prompts: to tune on, and to check on, with other seeds.
        file: where runs are remembered.
        of: what a run depends on, `dtype` among it; runs of anything else are forgotten.
        begin: told what runs.
    """

    def __init__(
        self,
        judge: QualityEvaluator,
        prompts: tuple[Sequence[str], Sequence[str]],
        file: Path,
        of: Mapping[str, Any],
        begin: Callable[[str], object],
    ) -> None:
        self._judge, self._prompts, self._file, self._begin = judge, prompts, file, begin
        self.exact_fraction = DTYPES[of["dtype"]].itemsize * 8 / EXACT_BITS
        """Of what travels as it is, see :attr:`Trial.step_fractions`."""
        self._stock: dict[bool, np.ndarray] = {}
        self.gallery: dict[str, np.ndarray] = {}
        """GeneratedImages of the check, by what made them."""
        self._known: dict[str, Any] = {"of": json.loads(json.dumps(of)), "trials": {}, "layers": []}
        if file.exists() and (before := json.loads(file.read_text()))["of"] == self._known["of"]:
            self._known = before
        self.done = len(self._known["trials"])
        """Runs that were remembered."""

    @property
    def layers(self) -> list[str]:
        """Of the model that exchange something, in the order in which they do."""
        return list(self._known["layers"])

    def mode(self, mode: str, held_out: bool = False, schedule: str | None = None) -> Trial:
        """By a mode, and changes to its schedule.

        Args:
            mode: which.
            held_out: on prompts and seeds that are for the check alone.
            schedule: changes.
        """
        return self._trial(f"{mode} {schedule or ''}".strip(), CodecCase(mode, schedule, sweep=False), held_out)

    def allotted(self, name: str, bits: BitAllocation, held_out: bool = False) -> Trial:
        """By bits that are tried, under a name that no other run has; from a file, as a user's runs have them."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "schedule.json")
            file.write_text(json.dumps(bits.to_json()))
            return self._trial(name, CodecCase("balanced", f"@{file}", sweep=False), held_out)

    def _exact(self, held_out: bool) -> np.ndarray:
        """GeneratedImages to compare with; they are not remembered."""
        if held_out not in self._stock:
            self._begin("exact, held out" if held_out else "exact")
            self._stock[held_out] = self._made(CodecCase(EXACT, None, sweep=False), held_out).values
            if held_out:
                self.gallery["stock"] = self._stock[held_out]
        return self._stock[held_out]

    def _made(self, row: CodecCase, held_out: bool) -> GeneratedImages:
        return self._judge.generate(row, self._prompts[held_out], FIRST_SEEDS[held_out])

    def _trial(self, name: str, row: CodecCase, held_out: bool) -> Trial:
        found = None if held_out else self._known["trials"].get(name)
        if found:
            return Trial(tuple(found["psnr_db"]), found["ssim"], found["lpips"], tuple(found["step_fractions"]))
        stock = self._exact(held_out)
        self._begin(f"{name}, held out" if held_out else name)
        made = self._made(row, held_out)
        trial = _compared(made, stock, self.exact_fraction)
        if held_out:
            self.gallery[name] = made.values
        else:
            self._remember(name, trial, made.layers)
        return trial

    def _remember(self, name: str, trial: Trial, layers: Sequence[str]) -> None:
        self._known["trials"][name] = asdict(trial)
        self._known["layers"] = self._known["layers"] or layers
        draft = self._file.with_suffix(".draft")
        draft.write_text(json.dumps(self._known))
        os.replace(draft, self._file)  # whole, however the search is broken off


def _compared(found: GeneratedImages, stock: np.ndarray, exact_fraction: float) -> Trial:
    known = compare_images(found.values, stock)
    fractions = tuple(exact_fraction * fraction for fraction in found.step_fractions)
    return Trial(tuple(known["psnr_db"]) or (_EQUAL,), known["ssim_mean"], known["lpips_mean"], fractions)


FIRST_SEEDS = 0, 10_000
"""Of what is tuned on, and of what is held out."""
_EQUAL = 150.0
"""In the place of an infinite PSNR."""
