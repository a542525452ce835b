"""`cocodiff quality`: errors and bytes on slow links, PSNR and SSIM to lossless runs at the same seeds, by mode.

Virtual ranks on a single rank apply the codecs as many ranks would. Of videos, all frames are compared.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch

from xfuser_cocodiff.engine.compression.mode_names import EXACT, MODES
from xfuser_cocodiff.engine.compression.modes import PRESETS, CodecSchedule
from xfuser_cocodiff.engine.compression.step_report import RunErrors, StepReport
from xfuser_cocodiff.engine.topology import plans
from xfuser_cocodiff.tools.comparison import fidelity
from xfuser_cocodiff.tools.comparison.charts import draw_contact_sheet
from xfuser_cocodiff.tools.launching import single_rank
from xfuser_cocodiff.tools.reporting import record_header
from xfuser_cocodiff.tools.reporting.formatting import NOT_MEASURED
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig

EXCHANGES = {
    (): "not coded",
    (plans.HEADS,): "by heads",
    (plans.KV,): "gathered K and V",
    (plans.HEADS, plans.KV): "by heads, gathered K and V",
    (single_rank.RING,): "ring",
}
"""Texts of the exchanges along slow axes."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
PROMPTS = ("a photo of a cat", "a photo of an astronaut", "a photo of a cup of coffee", "cell bodies")
"""Default prompts, which the small trained models know too."""
MAX_SHEET_IMAGES = 6
_TEXT_TOKENS = 32


@dataclass(frozen=True)
class CodecCase:
    """Mode to evaluate, and changes to its schedule."""

    mode: str
    changes: str | None = None

    def __str__(self) -> str:
        return f"{self.mode}@{self.changes}" if self.changes else self.mode


@dataclass
class GeneratedImages:
    """Images of one run, gray values in [0, 1], (N, [frames,] height, width), with the errors and bytes of the run."""

    values: np.ndarray
    exchanges: tuple[str, ...]
    """Exchanges along slow axes, see EXCHANGES."""
    reports: Sequence[StepReport]
    """Errors and bytes of each step."""
    yardsticks: dict[str, float]
    """Errors of FP8 and FP4 on the same tensors."""
    value_bytes: int
    """Bytes of a value without codecs."""

    @property
    def errors(self) -> dict[str, Any]:
        """Errors and bits as in records."""
        return RunErrors.of(self.reports, self.yardsticks, self.value_bytes)._asdict()

    @property
    def bytes_slow_fraction(self) -> float:
        """Bytes on slow links over lossless ones; all steps have equally many lossless bytes."""
        fractions = [report.sent_bytes / report.exact_bytes for report in self.reports if report.exact_bytes]
        return fmean(fractions) if fractions else 1.0


class QualityEvaluator:
    """Generator of images with a model, losslessly or by a codec, for the same seeds and prompts.

    Args:
        model: its name in xDiT's registry.
        config: virtual ranks and all settings that the codecs share.
        seeds: number of images or videos, each from a seed of its own.
        steps: denoising steps of each run.
        size: height and width of the images in pixels.
        dtype: of weights and activations.
        frames: of videos.
        guidance_scale: of classifier-free guidance, or of its embedding; None for the pipeline's default.
        prompts: used in turn.

    Raises:
        ValueError: the pipeline has no guidance scale.
    """

    def __init__(
        self,
        model: str,
        config: CocoDiffConfig,
        seeds: int,
        steps: int,
        size: int,
        dtype: torch.dtype,
        frames: int = 9,
        guidance_scale: float | None = None,
        prompts: Sequence[str] = PROMPTS,
    ) -> None:
        self._pipeline, self._config = single_rank.SingleRankPipeline(model, dtype), config
        self.settings = {"model": model, "steps": steps, "guidance_scale": guidance_scale, "seeds": seeds}
        """What records name."""
        if guidance_scale is not None and not self._pipeline.accepts_argument("guidance_scale"):
            raise ValueError(f"--guidance_scale {guidance_scale:g} is not valid: the pipeline of {model} has none")
        # This selects xDiT's attention for stock too, as on many ranks; that of diffusers has masks of its own.
        self._pipeline.configure(replace(config, mode=MODES[-1]))
        self._seeds, self._steps, self._dtype = seeds, steps, dtype
        self._arguments: dict[str, Any] = {"output_type": "np", "height": size, "width": size}
        if self._pipeline.makes_videos:
            self._arguments["num_frames"] = frames
        if guidance_scale is not None:
            self._arguments["guidance_scale"] = guidance_scale
        self._prompts = [prompts[number % len(prompts)] for number in range(seeds)]

    def generate(self, case: CodecCase) -> GeneratedImages:
        """Generate images from noise."""
        is_exact = case.mode == EXACT
        self._pipeline.configure(None if is_exact else replace(self._config, mode=case.mode, schedule=case.changes))
        generators = [torch.Generator().manual_seed(number) for number in range(self._seeds)]
        output = self._pipeline(self._prompts, self._steps, _TEXT_TOKENS, generator=generators, **self._arguments)
        images = output.images if "images" in output else output.frames
        return GeneratedImages(
            np.asarray(images).mean(-1),
            self._pipeline.exchanges,
            tuple(self._pipeline.reports),
            self._pipeline.yardsticks,
            self._dtype.itemsize,
        )


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
    stock = evaluator.generate(CodecCase(EXACT)).values
    gallery, rows = {"stock": stock}, []
    for case in cases:
        report(str(case))
        images = evaluator.generate(case)
        rows.append(
            {
                "mode": case.mode,
                "sweep": bool(case.changes),
                "codec": case.changes or "",
                "exchanges": list(images.exchanges),
                "bytes_slow_fraction": images.bytes_slow_fraction,
                **images.errors,
                **compare_images(images.values, stock),
                "inpaint": {},
            }
        )
        gallery[str(case)] = images.values
    return {**record_header.header(), **evaluator.settings, "rows": rows}, gallery


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
    from skimage.metrics import structural_similarity

    if reference.ndim == 3:
        return fmean(_ssim(*frames) for frames in zip(reference, other, strict=True))
    return float(structural_similarity(reference, other, data_range=1.0))


def parse_cases(modes: Sequence[str]) -> list[CodecCase]:
    """Parse modes, each a MODE or a MODE@CHANGES.

    Raises:
        ValueError: a mode or its changes are not valid.
    """
    cases = []
    for each in modes:
        mode, _, changes = each.partition("@")
        if mode not in MODES[1:]:
            raise ValueError(f"--mode {mode!r} is not valid; valid are {', '.join(MODES[1:])}")
        if changes:
            CodecSchedule.parse(changes.replace(";", ","), PRESETS[mode])
        cases.append(CodecCase(mode, changes.replace(";", ",") or None))
    return cases


def show(record: dict[str, Any]) -> None:
    """Print a table with one row per case."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    texts = ("mode", "changes", "exchange")
    for column in (*texts, "error", "by tensor", "bits", "bytes", "PSNR dB", "sd", "SSIM", "LPIPS"):
        table.add_column(column, justify="left" if column in texts else "right")
    for row in record["rows"]:
        table.add_row(
            row["mode"],
            row["codec"],
            EXCHANGES[tuple(row["exchanges"])],
            _format(row["mean_error"], ".2%"),
            " ".join(f"{name.upper()} {error:.1%}" for name, error in sorted(row["error"].items())),
            f"{row['bits']:.2f}",
            f"{row['bytes_slow_fraction']:.3f}",
            "equal" if row["bit_equal"] else _format(row["psnr_db_mean"], ".1f"),
            _format(row["psnr_db_sd"], ".1f"),
            f"{row['ssim_mean']:.4f}",
            _format(row["lpips_mean"], ".4f"),
        )
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)
    console.print(table)
    console.print("error: norm of decoded minus sent values over that of the sent ones, mean over tensors and steps")
    if yardsticks := next((row["yardsticks"] for row in record["rows"] if row["yardsticks"]), None):
        console.print("on the same tensors: " + ", ".join(f"{name.upper()} {e:.2%}" for name, e in yardsticks.items()))
    console.print("bits: per value that crosses slow links; bytes: over lossless ones of the same exchange")
    console.print("PSNR, SSIM, LPIPS: to lossless runs, mean over seeds")


def _format(value: float | None, digits: str) -> str:
    return NOT_MEASURED if value is None else format(value, digits)


def draw_images(gallery: Gallery, file: Path) -> None:
    """Draw a contact sheet with some images of every mode, or some frames of the first video."""
    rows = {}
    for name, images in gallery.items():
        shown = images if images.ndim == 3 else images[0]
        chosen = np.linspace(0, len(shown) - 1, min(len(shown), MAX_SHEET_IMAGES)).round().astype(int)
        rows[name] = shown[chosen]
    draw_contact_sheet(rows, file)
