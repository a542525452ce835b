"""`cocodiff quality`: bytes on slow links against PSNR and SSIM to lossless runs at the same seeds, by mode and codec.

Virtual ranks on a single rank apply the codecs as many ranks would. Inpainting, the task of the paper, is compared with
the original pictures. Of videos, all frames are compared.
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
from xfuser_cocodiff.lab.comparison import baselines, fidelity, inpainting
from xfuser_cocodiff.lab.comparison.charts import draw_contact_sheet
from xfuser_cocodiff.lab.comparison.virtual_ranks import VirtualRanks, VirtualRing
from xfuser_cocodiff.lab.launching import single_rank
from xfuser_cocodiff.lab.models import captions, slices
from xfuser_cocodiff.lab.reporting import host
from xfuser_cocodiff.lab.reporting.formatting import NOT_MEASURED
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig

FP8 = "FP8 as in xDiT"
ROW_FP8 = "FP8 as in cache-dit"
INT8 = "INT8 and FP8 as in FlashInfer"
FP4 = "FP4 as in LightX2V"
COMPACTFUSION = "residuals in a ring as in CompactFusion"
MODES_BY_HEADS = "modes by heads"
BASELINES = {
    MODES_BY_HEADS: VirtualRanks,
    FP8: baselines.Fp8,
    ROW_FP8: baselines.RowFp8,
    INT8: baselines.Int8,
    FP4: baselines.Fp4,
    COMPACTFUSION: VirtualRing,
}
"""By series, the class that replaces the virtual ranks; all of them but the ring send by heads."""
METHODS: dict[str, list[tuple[str, str | None]]] = {
    MODES_BY_HEADS: [("balanced", None), ("fast", None)],
    **{series: [("balanced", None)] for series in (FP8, ROW_FP8, INT8, FP4)},
    COMPACTFUSION: [("balanced", f"first=exact,predictor=0,bits={bits}") for bits in (4, 2, 1)],
}
"""By series, modes and changes to their schedules: our modes by heads, and the codes of other systems."""
EXCHANGES = {
    (): "not coded",
    (plans.HEADS,): "by heads",
    (plans.KV,): "gathered K and V",
    (plans.HEADS, plans.KV): "by heads, gathered K and V",
    (single_rank.RING,): "ring",
}
"""Texts of the exchanges along slow axes."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MAX_SHEET_PICTURES = 6
SLICE, PHOTO, VIDEO = "a slice of {}", "a photo of {}", "a video of {}"
"""Prompts that the small trained models know."""
_TEXT_TOKENS = 32


@dataclass(frozen=True)
class CodecCase:
    """Mode and codec schedule to evaluate."""

    mode: str
    schedule: str | None
    sweep: bool
    series: str = ""
    """Key of METHODS, or the mode."""

    def __str__(self) -> str:
        return f"{self.mode} {self.changes}".strip()

    @property
    def changes(self) -> str:
        """Differences to the mode, in words."""
        return " ".join(filter(None, (self.schedule, self.series if self.series in BASELINES else None)))


@dataclass
class GeneratedImages:
    """Images of one run, gray values in [0, 1], (N, [frames,] height, width), with the bytes that the run sent."""

    values: np.ndarray
    step_fractions: tuple[float, ...]
    """Bytes on slow links over lossless ones, by step; empty if no compression was active."""
    layers: tuple[str, ...]
    """Layers whose messages were compressed, in call order."""
    exchanges: tuple[str, ...]
    """Exchanges along slow axes, see EXCHANGES."""
    reports: tuple[StepReport, ...]
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
        return fmean(self.step_fractions) if self.step_fractions else 1.0


class QualityEvaluator:
    """Generator of images with a model, losslessly or by a codec, for the same seeds and prompts.

    Args:
        model: its name in xDiT's registry.
        config: virtual ranks and all settings that the codecs share.
        seeds: number of pictures or videos, each from a seed of its own.
        steps: denoising steps of each run.
        size: height and width of the pictures in pixels.
        dtype: of weights and activations.
        after_step: called after each step of a run.
        frames: of videos.
        guidance_scale: of classifier-free guidance, or of its embedding; None for the pipeline's default.

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
        after_step: Callable[[], object] = lambda: None,
        frames: int = 9,
        guidance_scale: float | None = None,
    ) -> None:
        self._pipeline, self._config, self._after_step = (
            single_rank.SingleRankPipeline(model, dtype),
            config,
            after_step,
        )
        self.settings = {"model": model, "steps": steps, "guidance_scale": guidance_scale}
        """What records name beside the seeds."""
        if guidance_scale is not None and not self._pipeline.accepts_argument("guidance_scale"):
            raise ValueError(f"--guidance_scale {guidance_scale:g} is not valid: the pipeline of {model} has none")
        # This selects xDiT's attention for stock too, as on many ranks; that of diffusers has masks of its own.
        self._pipeline.configure(replace(config, mode=MODES[-1]))
        self._seeds, self._steps, self._size, self._dtype = seeds, steps, size, dtype
        kinds = [slices.KINDS[seed % len(slices.KINDS)] for seed in range(seeds)]
        self._slice_prompts = [SLICE.format(captions.SLICES[kind]) for kind in kinds]
        makes_videos = self._pipeline.makes_videos
        self._shape = {"height": size, "width": size, **({"num_frames": frames} if makes_videos else {})}
        self.prompts = _video_prompts() if makes_videos else _picture_prompts()
        """Prompts that the small trained models know."""
        pictures = [slices.draw(kind, size, np.random.default_rng(1000 + seed)) for seed, kind in enumerate(kinds)]
        self._originals = np.stack(pictures)

    @property
    def inpaints(self) -> bool:
        """Whether the latent format of the model is known, which inpainting needs."""
        return inpainting.latent_format(self._pipeline.pipe) is not None

    def generate(self, case: CodecCase, prompts: Sequence[str] | None = None, first_seed: int = 0) -> GeneratedImages:
        """Generate images from noise.

        Args:
            case: mode and codec.
            prompts: used in turn; by default those that the small trained models know.
            first_seed: seed of the first image; the others have the seeds that follow.
        """
        prompts = prompts or self.prompts
        return self._run(case, [prompts[number % len(prompts)] for number in range(self._seeds)], first_seed)

    def inpaint(self, case: CodecCase, mask: str) -> GeneratedImages:
        """Generate the hidden pixels of the original pictures."""
        restore = inpainting.restore_known_pixels(self._pipeline.pipe, *self.originals(mask))
        return self._run(case, self._slice_prompts, 0, restore)

    def originals(self, mask: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the original pictures (N, height, width), and where a mask hides them (height, width)."""
        return self._originals, inpainting.mask(mask, self._size)

    def _run(
        self,
        case: CodecCase,
        prompts: list[str],
        first_seed: int,
        restore: Callable[..., dict[str, Any]] | None = None,
    ) -> GeneratedImages:
        """Run the pipeline once, with `restore` as callback at the end of each step."""

        def after_step(*step: Any) -> dict[str, Any]:
            self._after_step()
            return restore(*step) if restore else {}

        config = None if case.mode == EXACT else replace(self._config, mode=case.mode, schedule=case.schedule)
        self._pipeline.configure(config, BASELINES.get(case.series))
        generators = [torch.Generator().manual_seed(first_seed + number) for number in range(self._seeds)]
        arguments: dict[str, Any] = {"generator": generators, "output_type": "np", **self._shape}
        if self.settings["guidance_scale"] is not None:
            arguments["guidance_scale"] = self.settings["guidance_scale"]
        if self._pipeline.accepts_argument("callback_on_step_end"):
            arguments["callback_on_step_end"] = after_step
        output = self._pipeline(prompts, self._steps, _TEXT_TOKENS, **arguments)
        images = output.images if "images" in output else output.frames
        reports, yardsticks = self._pipeline.reports, self._pipeline.yardsticks
        fractions = tuple(report.sent_bytes / report.exact_bytes for report in reports if report.exact_bytes)
        layers = tuple(dict.fromkeys(layer for report in reports for layer in report.errors))
        return GeneratedImages(
            *(np.asarray(images).mean(-1), fractions, layers, self._pipeline.exchanges),
            *(tuple(reports), yardsticks, self._dtype.itemsize),
        )


def _picture_prompts() -> list[str]:
    prompts = [SLICE.format(name) for name in captions.SLICES.values()]
    return prompts + [PHOTO.format(name) for name in captions.PHOTOS.values()]


def _video_prompts() -> list[str]:
    return [VIDEO.format(name) for name in captions.VOLUMES.values()]


Gallery = dict[str, dict[str, np.ndarray]]
"""Images (N, [frames,] height, width) by task ("" for generation, or a mask) and by mode."""


def measure(
    evaluator: QualityEvaluator, cases: Sequence[CodecCase], masks: Sequence[str], report: Callable[[str], None]
) -> tuple[dict[str, Any], Gallery]:
    """Evaluate codecs.

    Args:
        evaluator: of a model.
        cases: modes and codecs to evaluate.
        masks: masks of the inpainting; none for generation only.
        report: called with the name of each case when it begins.

    Returns:
        The record without its command, and the images of the modes.
    """
    tasks = ("", *masks)

    def run_tasks(case: CodecCase) -> dict[str, GeneratedImages]:
        report(str(case))
        return {task: evaluator.inpaint(case, task) if task else evaluator.generate(case) for task in tasks}

    stock = run_tasks(CodecCase(EXACT, None, sweep=False))
    gallery: Gallery = {task: {"truth": evaluator.originals(task)[0]} if task else {} for task in tasks}
    for task in tasks:
        gallery[task]["stock"] = stock[task].values
    rows: list[dict[str, Any]] = []
    for case in cases:
        if _repeats_default(case, rows):
            continue
        images = run_tasks(case)
        rows.append(
            {
                "mode": case.mode,
                "sweep": case.sweep,
                "series": case.series,
                "codec": case.changes,
                "exchanges": list(images[""].exchanges),
                "bytes_slow_fraction": images[""].bytes_slow_fraction,
                **images[""].errors,
                **compare_images(images[""].values, stock[""].values),
                "inpaint": {
                    mask: _compare_inpainted(images[mask].values, stock[mask].values, *evaluator.originals(mask))
                    for mask in masks
                },
            }
        )
        if not case.sweep:
            for task in tasks:
                gallery[task][case.mode] = images[task].values
    seeds = len(stock[""].values)
    return {
        **host.header(),
        **evaluator.settings,
        "seeds": seeds,
        "inpaints": evaluator.inpaints,
        "rows": rows,
    }, gallery


def _repeats_default(case: CodecCase, rows: Sequence[dict[str, Any]]) -> bool:
    """Return whether a case by heads would repeat the same bits of an earlier row, whose default was by heads too."""
    earlier = [row["exchanges"] for row in rows if row["series"] == case.mode]
    return case.series == MODES_BY_HEADS and bool(earlier) and all(each == [plans.HEADS] for each in earlier)


def compare_images(images: np.ndarray, stock: np.ndarray) -> dict[str, Any]:
    """Return PSNR, SSIM and LPIPS of images to stock's, over all seeds."""
    psnr = _psnr_values(stock, images)
    return {
        "bit_equal": bool(np.array_equal(stock, images)),
        "psnr_db": psnr,
        "psnr_db_mean": fmean(psnr) if psnr else None,
        "psnr_db_sd": stdev(psnr) if len(psnr) > 1 else None,
        "ssim_mean": fmean(_ssim(a, b) for a, b in zip(stock, images, strict=True)),
        "lpips_mean": fidelity.lpips(stock, images),
    }


def _compare_inpainted(
    images: np.ndarray, stock: np.ndarray, originals: np.ndarray, hidden: np.ndarray
) -> dict[str, float]:
    """Return the fidelity of inpainted images to the originals, and that of stock's images beside it."""
    ours = _inpainting_fidelity(images, originals, hidden)
    return ours | {f"{name}_stock": value for name, value in _inpainting_fidelity(stock, originals, hidden).items()}


def _inpainting_fidelity(images: np.ndarray, originals: np.ndarray, hidden: np.ndarray) -> dict[str, float]:
    """Return PSNR, SSIM and mean squared error to the originals; pixels that are not hidden count as equal."""
    inpainted = np.where(hidden, images, originals)
    return {
        "psnr_db": fmean(_psnr_values(originals, inpainted)),
        "ssim": fmean(_ssim(a, b) for a, b in zip(originals, inpainted, strict=True)),
        "mse": float(((inpainted - originals)[:, hidden] ** 2).mean()),
    }


def _psnr_values(references: np.ndarray, others: np.ndarray) -> list[float]:
    """Return the PSNR of each picture, or over all frames of each video, without those that are infinite."""
    values = (fidelity.psnr_db(a, b, 1.0) for a, b in zip(references, others, strict=True))
    return [value for value in values if value is not None]


def _ssim(reference: np.ndarray, other: np.ndarray) -> float:
    """Return the SSIM of two pictures, or its mean over the frames of two videos."""
    from skimage.metrics import structural_similarity

    if reference.ndim == 3:
        return fmean(_ssim(*frames) for frames in zip(reference, other, strict=True))
    return float(structural_similarity(reference, other, data_range=1.0))


def parse_cases(modes: Sequence[str], with_methods: bool = False) -> list[CodecCase]:
    """Return the cases to evaluate.

    Args:
        modes: each MODE or MODE@SCHEDULE, where a semicolon stands for a comma.
        with_methods: whether those of :data:`METHODS` are added.

    Raises:
        ValueError: a mode is unknown or exact, or a schedule is not valid.
    """
    cases = []
    for text in modes:
        mode, _, schedule = text.partition("@")
        changes = schedule.replace(";", ",") or None
        if mode not in MODES or mode == EXACT:
            raise ValueError(f"--mode {mode!r} is not valid; valid are {', '.join(MODES[1:])}")
        if changes:
            CodecSchedule.parse(changes, PRESETS[mode])
        cases.append(CodecCase(mode, changes, bool(changes), f"{mode}, changed" if changes else mode))
    methods = METHODS if with_methods else {}
    return cases + [CodecCase(*each, sweep=True, series=name) for name in methods for each in METHODS[name]]


def show(record: dict[str, Any]) -> None:
    """Print a table with one row per case."""
    from rich.console import Console
    from rich.table import Table

    masks = list(record["rows"][0]["inpaint"])
    table = Table(box=None)
    texts = ("mode", "changes", "exchange")
    numbers = ("error", "by tensor", "bits", "bytes", "PSNR dB", "sd", "SSIM", "LPIPS")
    for column in (*texts, *numbers, *(f"{mask} dB (stock)" for mask in masks)):
        table.add_column(column, justify="left" if column in texts else "right")
    for row in record["rows"]:
        inpainted = [row["inpaint"][mask] for mask in masks]
        table.add_row(
            row["mode"],
            row["codec"],
            EXCHANGES[tuple(row["exchanges"])],
            NOT_MEASURED if row["mean_error"] is None else f"{row['mean_error']:.2%}",
            " ".join(f"{name.upper()} {error:.1%}" for name, error in sorted(row["error"].items())),
            f"{row['bits']:.2f}",
            f"{row['bytes_slow_fraction']:.3f}",
            "equal" if row["bit_equal"] else _format_decimal(row["psnr_db_mean"]),
            _format_decimal(row["psnr_db_sd"]),
            f"{row['ssim_mean']:.4f}",
            NOT_MEASURED if row["lpips_mean"] is None else f"{row['lpips_mean']:.4f}",
            *(f"{one['psnr_db']:.2f} ({one['psnr_db_stock']:.2f})" for one in inpainted),
        )
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)
    console.print(table)
    console.print("error: norm of decoded minus sent values over that of the sent ones, mean over tensors and steps")
    if yardsticks := next((row["yardsticks"] for row in record["rows"] if row["yardsticks"]), None):
        console.print("on the same tensors: " + ", ".join(f"{name.upper()} {e:.2%}" for name, e in yardsticks.items()))
    console.print("bits: per value that crosses slow links; bytes: over lossless ones of the same exchange")
    console.print("PSNR, SSIM, LPIPS: to lossless runs, mean over seeds")
    if not record["inpaints"]:
        console.print("no inpainting: the latent format of this pipeline is unknown")


def _format_decimal(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.1f}"


def draw_pictures(gallery: Gallery, file: Path) -> None:
    """Draw a contact sheet with some pictures of every task and mode, or some frames of the first video."""
    rows = {}
    for task, images_by_mode in gallery.items():
        for mode, images in images_by_mode.items():
            pictures = images if images.ndim == 3 else images[0]
            count = min(len(pictures), MAX_SHEET_PICTURES)
            chosen = np.linspace(0, len(pictures) - 1, count).round().astype(int)
            rows[f"{task} {mode}".strip()] = pictures[chosen]
    draw_contact_sheet(rows, file)
