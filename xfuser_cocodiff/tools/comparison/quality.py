"""`cocodiff quality`: errors and bytes on slow links, PSNR and SSIM to lossless runs at the same seeds, by mode.

Virtual ranks on a single rank apply the codecs as many ranks would. Of videos, all frames are compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch

from xfuser_cocodiff.engine.compression.default_mode import EXACT, MODES
from xfuser_cocodiff.engine.compression.modes import PRESETS, CodecSchedule
from xfuser_cocodiff.engine.compression.step_report import RunErrors
from xfuser_cocodiff.tools.comparison import axis_collectives, fidelity
from xfuser_cocodiff.tools.comparison.charts import draw_contact_sheet
from xfuser_cocodiff.tools.launching import single_rank
from xfuser_cocodiff.tools.reporting import record_header
from xfuser_cocodiff.xdit.session.session import active
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig

PROMPTS = ("a photo of a cat", "a photo of an astronaut", "a photo of a cup of coffee", "cell bodies")
"""Default prompts, which the small trained models know too."""
MAX_SHEET_IMAGES = 6
_RING = "ring"
"""Name of a ring along slow axes, beside those of :mod:`plans`."""
_TEXT_TOKENS = 32


@dataclass(frozen=True)
class CodecCase:
    """Mode to evaluate, and changes to its schedule."""

    mode: str
    changes: str | None = None

    def __str__(self) -> str:
        return f"{self.mode}@{self.changes}" if self.changes else self.mode


@dataclass
class QualityEvaluator:
    """Generator of images with a model, losslessly or by a codec, for the same seeds and prompts.

    Raises:
        ValueError: the pipeline has no guidance scale.
    """

    model: str
    """Its name in xDiT's registry."""
    config: CocoDiffConfig
    """Virtual ranks, and all settings that the codecs share."""
    seeds: int
    """Number of images or videos, each from a seed of its own."""
    steps: int
    """Denoising steps of each run."""
    size: int
    """Height and width of the images in pixels."""
    dtype: torch.dtype
    """Of weights and activations."""
    frames: int = 9
    """Of videos."""
    guidance_scale: float | None = None
    """Of classifier-free guidance, or of its embedding; None for the pipeline's default."""
    prompts: Sequence[str] = PROMPTS
    """Used in turn."""

    def __post_init__(self) -> None:
        self._pipeline = single_rank.SingleRankPipeline(self.model, self.dtype)
        # This selects xDiT's attention for stock too, as on many ranks; that of diffusers has masks of its own.
        self._pipeline.configure(replace(self.config, mode=MODES[-1]))
        self._arguments: dict[str, Any] = {"output_type": "np", "height": self.size, "width": self.size}
        if self._pipeline.makes_videos:
            self._arguments["num_frames"] = self.frames
        if (scale := self.guidance_scale) is not None:
            if not self._pipeline.accepts_argument("guidance_scale"):
                raise ValueError(f"--guidance_scale {scale:g} is not valid: the pipeline of {self.model} has none")
            self._arguments["guidance_scale"] = scale

    def generate(self, case: CodecCase) -> tuple[np.ndarray, dict[str, Any]]:
        """Generate images or videos from noise.

        Returns:
            Gray values in [0, 1], (N, [frames,] height, width), and collectives, errors and bytes as in records.
        """
        coded = replace(self.config, mode=case.mode, schedule=case.changes)
        self._pipeline.configure(None if case.mode == EXACT else coded)
        generators = [torch.Generator().manual_seed(number) for number in range(self.seeds)]
        prompts = [self.prompts[number % len(self.prompts)] for number in range(self.seeds)]
        output = self._pipeline(prompts, self.steps, _TEXT_TOKENS, generator=generators, **self._arguments)
        images = output.images if "images" in output else output.frames
        runtime, virtual = active().runtime, active().virtual_group
        reports = runtime.reports if runtime else []
        ways = [_RING] if virtual and virtual.is_ring else axis_collectives.of_codecs(reports)
        # All steps have equally many lossless bytes.
        fractions = [report.sent_bytes / report.exact_bytes for report in reports if report.exact_bytes]
        return np.asarray(images).mean(-1), {
            "exchanges": ways if any(report.errors for report in reports) else [],
            "bytes_slow_fraction": fmean(fractions) if fractions else 1.0,
            **RunErrors.of(reports, runtime.yardsticks if runtime else {}, self.dtype.itemsize)._asdict(),
        }


Gallery = dict[str, np.ndarray]
"""Images (N, [frames,] height, width) of stock and by mode."""


def measure(
    evaluator: QualityEvaluator, cases: Sequence[CodecCase], report: Callable[[str], None]
) -> tuple[dict[str, Any], Gallery]:
    """Evaluate codecs.

    Args:
        evaluator: of a model.
        cases: modes and codecs to evaluate.
        report: called with the name of each case when it begins.

    Returns:
        The record without its command, and the images of stock and of the modes.
    """
    report(EXACT)
    stock, _ = evaluator.generate(CodecCase(EXACT))
    gallery, rows = {"stock": stock}, []
    for case in cases:
        report(str(case))
        images, figures = evaluator.generate(case)
        how = {"mode": case.mode, "sweep": bool(case.changes), "codec": case.changes or ""}
        rows.append({**how, **figures, **compare_images(images, stock), "inpaint": {}})
        gallery[str(case)] = images
    settings = {name: getattr(evaluator, name) for name in ("model", "steps", "guidance_scale", "seeds")}
    return {**record_header.header(), **settings, "rows": rows}, gallery


def compare_images(images: np.ndarray, stock: np.ndarray) -> dict[str, Any]:
    """Return PSNR, SSIM and LPIPS of images to stock's, over all seeds."""
    values = (fidelity.psnr_db(a, b, 1.0) for a, b in zip(stock, images, strict=True))
    psnr = [value for value in values if value is not None]
    return {
        "bit_equal": bool(np.array_equal(stock, images)),
        "psnr_db": psnr,
        "psnr_db_mean": fmean(psnr) if psnr else None,
        "psnr_db_sd": stdev(psnr) if len(psnr) > 1 else None,
        "ssim_mean": fmean(_ssim(a, b) for a, b in zip(stock, images, strict=True)),
        "lpips_mean": fidelity.lpips(stock, images),
    }


def _ssim(reference: np.ndarray, other: np.ndarray) -> float:
    """Return the SSIM of two images, or its mean over the frames of two videos."""
    if reference.ndim == 3:
        return fmean(_ssim(*frames) for frames in zip(reference, other, strict=True))
    return fidelity.ssim(reference, other, 1.0)


def parse_cases(modes: Sequence[str]) -> list[CodecCase]:
    """Parse modes, each a MODE or a MODE@CHANGES.

    Raises:
        ValueError: a mode or its changes are not valid.
    """
    cases = []
    for each in modes:
        mode, _, changes = each.partition("@")
        if mode not in MODES[1:]:
            raise ValueError(f"--modes {mode!r} is not valid; valid are {', '.join(MODES[1:])}")
        if changes:
            CodecSchedule.parse(changes.replace(";", ","), PRESETS[mode])
        cases.append(CodecCase(mode, changes.replace(";", ",") or None))
    return cases


def draw_images(gallery: Gallery, file: Path) -> None:
    """Draw a contact sheet with some images of every mode, or some frames of the first video."""
    rows = {}
    for name, images in gallery.items():
        shown = images if images.ndim == 3 else images[0]
        chosen = np.linspace(0, len(shown) - 1, min(len(shown), MAX_SHEET_IMAGES)).round().astype(int)
        rows[name] = shown[chosen]
    draw_contact_sheet(rows, file)
