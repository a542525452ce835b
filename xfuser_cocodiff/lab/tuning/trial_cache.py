"""Runs of a model with candidate bits, cached in a file so that an interrupted search resumes.

Runs on held-out prompts are not cached: their images are shown, and the file has no images.
"""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from xfuser_cocodiff.engine.compression.bit_allocation import BitAllocation
from xfuser_cocodiff.engine.settings.options import EXACT
from xfuser_cocodiff.engine.topology import json_file
from xfuser_cocodiff.lab.comparison.quality import (
    DTYPES,
    CodecCase,
    GeneratedImages,
    QualityEvaluator,
    compare_images,
)
from xfuser_cocodiff.lab.tuning.rate_distortion import EXACT_BITS

FIRST_SEEDS = 0, 10_000
"""First seed of the runs to tune on, and of the held-out runs."""
_EQUAL_PSNR_DB = 150.0
"""Stands for an infinite PSNR."""


@dataclass(frozen=True)
class BitTrial:
    """Quality and bytes of one run."""

    psnr_db: tuple[float, ...]
    """PSNR of each image to the lossless one."""
    ssim: float
    lpips: float | None
    step_fractions: tuple[float, ...]
    """By step, bytes on slow axes over those of lossless bfloat16; lossless float32 has a fraction of 2."""

    @property
    def bytes_fraction(self) -> float:
        """Bytes of the whole run over the lossless ones."""
        return fmean(self.step_fractions)

    @property
    def later_bytes_fraction(self) -> float:
        """Bytes after the first step over the lossless ones."""
        return fmean(self.step_fractions[1:])

    @property
    def mean_psnr_db(self) -> float:
        """Mean PSNR over the images."""
        return fmean(self.psnr_db)

    @property
    def error(self) -> float:
        """Mean squared error that corresponds to the mean PSNR."""
        return 10 ** (-self.mean_psnr_db / 10)


class TrialCache:
    """Runner of trials over the same prompts and seeds, with their results cached in a file.

    Args:
        evaluator: of the model.
        prompts: to tune on, and held out; the held-out runs have other seeds too.
        file: cache file.
        key: all that the results depend on, `dtype` included; a file with another key is ignored.
        report: called with the name of each run when it begins.
    """

    def __init__(
        self,
        evaluator: QualityEvaluator,
        prompts: tuple[Sequence[str], Sequence[str]],
        file: Path,
        key: Mapping[str, Any],
        report: Callable[[str], object],
    ) -> None:
        self._evaluator, self._prompts, self._file, self._report = evaluator, prompts, file, report
        self.exact_fraction = DTYPES[key["dtype"]].itemsize * 8 / EXACT_BITS
        """Bytes of a lossless step over those of lossless bfloat16, see :attr:`BitTrial.step_fractions`."""
        self._exact_images: dict[bool, np.ndarray] = {}
        self.gallery: dict[str, np.ndarray] = {}
        """Images of the held-out runs, by name."""
        self._contents: dict[str, Any] = {"of": json.loads(json.dumps(key)), "trials": {}, "layers": []}
        if file.exists() and (earlier := _read(file)).get("of") == self._contents["of"]:
            self._contents = earlier
        self.num_cached = len(self._contents["trials"])
        """Number of trials that the file had at the start."""

    @property
    def layers(self) -> list[str]:
        """Layers with communication, in call order; empty before the first trial."""
        return list(self._contents["layers"])

    def run_mode(self, mode: str, held_out: bool = False, schedule: str | None = None) -> BitTrial:
        """Run a mode.

        Args:
            mode: of the plugin.
            held_out: whether to run the held-out prompts and seeds.
            schedule: changes to the codec schedule of the mode.
        """
        return self._trial(f"{mode} {schedule or ''}".strip(), CodecCase(mode, schedule, sweep=False), held_out)

    def run_allocation(self, name: str, allocation: BitAllocation, held_out: bool = False) -> BitTrial:
        """Run a bit allocation, read from a file as in the runs of a user.

        Args:
            name: unique name of the trial.
            allocation: bits to run with.
            held_out: whether to run the held-out prompts and seeds.
        """
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "schedule.json")
            file.write_text(json.dumps(allocation.to_json()))
            return self._trial(name, CodecCase("balanced", f"@{file}", sweep=False), held_out)

    def _exact(self, held_out: bool) -> np.ndarray:
        """Return the lossless images, which are generated once."""
        if held_out not in self._exact_images:
            self._report("exact, held out" if held_out else "exact")
            self._exact_images[held_out] = self._generate(CodecCase(EXACT, None, sweep=False), held_out).values
            if held_out:
                self.gallery["stock"] = self._exact_images[held_out]
        return self._exact_images[held_out]

    def _generate(self, case: CodecCase, held_out: bool) -> GeneratedImages:
        return self._evaluator.generate(case, self._prompts[held_out], FIRST_SEEDS[held_out])

    def _trial(self, name: str, case: CodecCase, held_out: bool) -> BitTrial:
        cached = None if held_out else self._contents["trials"].get(name)
        if cached:
            psnr_db, step_fractions = tuple(cached["psnr_db"]), tuple(cached["step_fractions"])
            return BitTrial(psnr_db, cached["ssim"], cached["lpips"], step_fractions)
        exact = self._exact(held_out)
        self._report(f"{name}, held out" if held_out else name)
        images = self._generate(case, held_out)
        trial = _compare(images, exact, self.exact_fraction)
        if held_out:
            self.gallery[name] = images.values
        else:
            self._write(name, trial, images.layers)
        return trial

    def _write(self, name: str, trial: BitTrial, layers: Sequence[str]) -> None:
        """Add a trial to the cache file, which is replaced atomically."""
        self._contents["trials"][name] = asdict(trial)
        self._contents["layers"] = self._contents["layers"] or layers
        json_file.replace(self._file, json.dumps(self._contents))


def _read(file: Path) -> dict[str, Any]:
    """Return the contents of a cache file; nothing if it is damaged, and all trials run again."""
    try:
        contents = json_file.read(file, json_file.MAX_RECORD_BYTES)
        if isinstance(contents["trials"], dict) and isinstance(contents["layers"], list):
            return dict(contents)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return {}


def _compare(images: GeneratedImages, exact: np.ndarray, exact_fraction: float) -> BitTrial:
    quality = compare_images(images.values, exact)
    fractions = tuple(exact_fraction * fraction for fraction in images.step_fractions)
    psnr_db = tuple(quality["psnr_db"]) or (_EQUAL_PSNR_DB,)
    return BitTrial(psnr_db, quality["ssim_mean"], quality["lpips_mean"], fractions)
