"""`cocodiff quality`: bytes on slow links against fidelity, for modes and codecs, against exact runs at the same seeds.

Virtual ranks on one real one apply what codecs would do among many. The task of the paper is inpainting, where what was
to be found is judged against the truth. Of models that make videos, all frames are judged.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch

from xfuser_cocodiff.engine.compression.modes import CodecSchedule
from xfuser_cocodiff.engine.compression.virtual_ranks import VirtualRing
from xfuser_cocodiff.engine.settings.config import CocoDiffConfig
from xfuser_cocodiff.engine.settings.options import EXACT, MODES
from xfuser_cocodiff.lab.comparison import baselines, fidelity, inpainting
from xfuser_cocodiff.lab.comparison.charts import draw_contact_sheet
from xfuser_cocodiff.lab.models import captions, slices
from xfuser_cocodiff.lab.reporting import host
from xfuser_cocodiff.lab.reporting.formatting import NOT_MEASURED
from xfuser_cocodiff.xdit.launching.single_rank import SingleRankPipeline

_ALL = "bits={0},bits_o={0}"
FP8 = "FP8, as xDiT's"
RING = "as many bits everywhere, in a ring"
COMPACTFUSION = "residuals in a ring, as CompactFusion's"
BASELINES = {FP8: baselines.Fp8, RING: VirtualRing, COMPACTFUSION: VirtualRing}
"""By series, what stands in the place of virtual ranks."""
SWEEP: dict[str, list[tuple[str, str | None]]] = {
    "as many bits everywhere": [("balanced", _ALL.format(bits)) for bits in (8, 4, 2.7, 2, 1.6, 1)],
    RING: [("balanced", _ALL.format(bits)) for bits in (4, 2.7, 2, 1.6, 1)],
    COMPACTFUSION: [("balanced", f"first=exact,predictor=0,{_ALL.format(bits)}") for bits in (4, 2, 1)],
    FP8: [("balanced", None)],
    "fewer tokens": [
        ("balanced", f"bits={bits},bits_o={o},cached={cached},predictor=0.5")
        for cached in (0.25, 0.5, 0.75)
        for bits, o in ((4, 2), (2, 2), (2, 1))
    ],
    "the paper's rule": [
        ("paper", f"refresh={refresh},score={score}") for refresh in (0, 10) for score in ("change", "drift", "random")
    ],
}
"""Modes and changes to their schedules, by what they are called in a plot."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SHEET_PICTURES = 6
SLICE, PHOTO, VIDEO = "a slice of {}", "a photo of {}", "a video of {}"
"""Prompts, as the small trained models know them."""
_TEXT_TOKENS = 32


@dataclass(frozen=True)
class Row:
    """One codec to judge."""

    mode: str
    schedule: str | None
    sweep: bool
    series: str = ""
    """What it belongs to in a plot."""

    def __str__(self) -> str:
        return f"{self.mode} {self.changes}".strip()

    @property
    def changes(self) -> str:
        """What is other than in the mode."""
        return " ".join(filter(None, (self.schedule, self.series if self.series in BASELINES else None)))


@dataclass
class Pictures:
    """Grey values from 0 to 1, (N, [frames,] height, width), and their run's share of the exact bytes on slow links."""

    values: np.ndarray
    step_fractions: tuple[float, ...]
    """Of each step, which all exchange as much; none where nothing was coded."""
    layers: tuple[str, ...]
    """That were coded, in the order in which they come."""

    @property
    def bytes_slow_fraction(self) -> float:
        """Of the run."""
        return fmean(self.step_fractions) if self.step_fractions else 1.0


class QualityEvaluator:
    """Runs a model and compares what comes of it.

    Args:
        model: its name in xDiT's registry.
        config: virtual ranks, and what else is the same for all codecs.
        seeds: how many pictures, or videos, each from a seed of its own.
        steps: of each run.
        size: of the pictures, in pixels.
        dtype: of weights and activations.
        after_step: called after each step of a run.
        frames: of videos.
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
    ) -> None:
        self._pipeline, self._config, self._after_step = SingleRankPipeline(model, dtype), config, after_step
        # From now on attention is xDiT's, for stock too, as on many ranks: that of diffusers has masks of its own.
        self._pipeline.configure(replace(config, mode=MODES[-1]))
        self._seeds, self._steps, self._size = seeds, steps, size
        kinds = [slices.KINDS[seed % len(slices.KINDS)] for seed in range(seeds)]
        self._of_slices = [SLICE.format(captions.SLICES[kind]) for kind in kinds]
        self._shape = {"height": size, "width": size, **({"num_frames": frames} if self._pipeline.makes_videos else {})}
        self.prompts = _of_videos() if self._pipeline.makes_videos else _of_pictures()
        """That the small trained model knows."""
        pictures = [slices.draw(kind, size, np.random.default_rng(1000 + seed)) for seed, kind in enumerate(kinds)]
        self._truth = np.stack(pictures)

    @property
    def inpaints(self) -> bool:
        """Whether it is known how to put known pixels back into latents of the model."""
        return inpainting.layout(self._pipeline.pipe) is not None

    def generate(self, row: Row, prompts: Sequence[str] | None = None, first_seed: int = 0) -> Pictures:
        """Pictures from noise.

        Args:
            row: by which codec.
            prompts: taken in turn; those that the small trained model knows if there are none.
            first_seed: of the first picture; those of the others follow.
        """
        every = prompts or self.prompts
        return self._run(row, [every[number % len(every)] for number in range(self._seeds)], first_seed)

    def inpaint(self, row: Row, mask: str) -> Pictures:
        """Pictures of which what the mask leaves is known."""
        keep = inpainting.keep_known(self._pipeline.pipe, *self.truth(mask))
        return self._run(row, self._of_slices, 0, keep)

    def truth(self, mask: str) -> tuple[np.ndarray, np.ndarray]:
        """The true pictures, and where they are to be found."""
        return self._truth, inpainting.mask(mask, self._size)

    def _run(
        self, row: Row, prompts: list[str], first_seed: int, keep: Callable[..., dict[str, Any]] | None = None
    ) -> Pictures:
        def after_step(*step: Any) -> dict[str, Any]:
            self._after_step()
            return keep(*step) if keep else {}

        approximated = replace(self._config, mode=row.mode, schedule=row.schedule)
        self._pipeline.configure(None if row.mode == EXACT else approximated, BASELINES.get(row.series))
        generators = [torch.Generator().manual_seed(first_seed + number) for number in range(self._seeds)]
        more: dict[str, Any] = (
            {"callback_on_step_end": after_step} if self._pipeline.accepts_argument("callback_on_step_end") else {}
        )
        more |= {"generator": generators, "output_type": "np", **self._shape}
        output = self._pipeline(prompts, self._steps, _TEXT_TOKENS, **more)
        made = output.images if "images" in output else output.frames
        reports = self._pipeline.reports
        fractions = tuple(report.sent_bytes / report.exact_bytes for report in reports if report.exact_bytes)
        layers = tuple(dict.fromkeys(layer for report in reports for layer in report.errors))
        return Pictures(np.asarray(made).mean(-1), fractions, layers)


def _of_pictures() -> list[str]:
    found = [SLICE.format(name) for name in captions.SLICES.values()]
    return found + [PHOTO.format(name) for name in captions.PHOTOS.values()]


def _of_videos() -> list[str]:
    return [VIDEO.format(name) for name in captions.VOLUMES.values()]


Gallery = dict[str, dict[str, np.ndarray]]
"""Pictures (N, [frames,] height, width) by task, that is generation or a mask, and by what made them."""


def measure(
    judge: QualityEvaluator, rows: Sequence[Row], masks: Sequence[str], show: Callable[[str], None]
) -> tuple[dict[str, Any], Gallery]:
    """Judge codecs.

    Args:
        judge: of a model.
        rows: what to judge.
        masks: of the inpainting; none leave it out.
        show: told what is done.

    Returns:
        A record, less its command, and the pictures of all codecs that are not of a sweep.
    """
    tasks = ("", *masks)

    def pictures(row: Row) -> dict[str, Pictures]:
        show(str(row))
        return {task: judge.inpaint(row, task) if task else judge.generate(row) for task in tasks}

    stock = pictures(Row(EXACT, None, sweep=False))
    gallery: Gallery = {task: {"truth": judge.truth(task)[0]} if task else {} for task in tasks}
    for task in tasks:
        gallery[task]["stock"] = stock[task].values
    found = []
    for row in rows:
        made = pictures(row)
        found.append(
            {
                "mode": row.mode,
                "sweep": row.sweep,
                "series": row.series,
                "codec": row.changes,
                "bytes_slow_fraction": made[""].bytes_slow_fraction,
                **fidelity_of(made[""].values, stock[""].values),
                "inpaint": {
                    mask: {
                        **_inpainted(made[mask].values, *judge.truth(mask)),
                        **{f"{k}_stock": v for k, v in _inpainted(stock[mask].values, *judge.truth(mask)).items()},
                    }
                    for mask in masks
                },
            }
        )
        if not row.sweep:
            for task in tasks:
                gallery[task][row.mode] = made[task].values
    seeds = len(stock[""].values)
    return {**host.header(), "seeds": seeds, "inpaints": judge.inpaints, "rows": found}, gallery


def fidelity_of(found: np.ndarray, wanted: np.ndarray) -> dict[str, Any]:
    """To stock's pictures, over all seeds."""
    decibels = _decibels(wanted, found)
    return {
        "bit_equal": bool(np.array_equal(wanted, found)),
        "psnr_db": decibels,
        "psnr_db_mean": fmean(decibels) if decibels else None,
        "psnr_db_sd": stdev(decibels) if len(decibels) > 1 else None,
        "ssim_mean": fmean(_ssim(a, b) for a, b in zip(wanted, found, strict=True)),
        "lpips_mean": fidelity.lpips(wanted, found),
    }


def _inpainted(found: np.ndarray, truth: np.ndarray, hidden: np.ndarray) -> dict[str, float]:
    """Against the truth, over what was hidden; known pixels are as they were given."""
    whole = np.where(hidden, found, truth)
    return {
        "psnr_db": fmean(_decibels(truth, whole)),
        "ssim": fmean(_ssim(a, b) for a, b in zip(truth, whole, strict=True)),
        "mse": float(((whole - truth)[:, hidden] ** 2).mean()),
    }


def _decibels(references: np.ndarray, others: np.ndarray) -> list[float]:
    """PSNR of each picture, or of all frames of each video; those that are equal have none."""
    found = (fidelity.psnr_db(a, b, 1.0) for a, b in zip(references, others, strict=True))
    return [value for value in found if value is not None]


def _ssim(reference: np.ndarray, other: np.ndarray) -> float:
    """Of a video the mean of its frames."""
    from skimage.metrics import structural_similarity

    if reference.ndim == 3:
        return fmean(_ssim(*frames) for frames in zip(reference, other, strict=True))
    return float(structural_similarity(reference, other, data_range=1.0))


def rows(modes: Sequence[str], sweep: bool) -> list[Row]:
    """What to judge.

    Args:
        modes: each MODE or MODE@SCHEDULE, where a semicolon stands for a comma.
        sweep: whether to add many codecs.

    Raises:
        ValueError: an unknown mode, or no schedule.
    """
    found = []
    for text in modes:
        mode, _, schedule = text.partition("@")
        changes = schedule.replace(";", ",") or None
        if mode not in MODES or mode == EXACT:
            raise ValueError(f"--mode {mode!r} is not valid; valid are {', '.join(MODES[1:])}")
        if changes:
            CodecSchedule.parse(changes, CodecSchedule())
        found.append(Row(mode, changes, bool(changes), f"{mode}, changed" if changes else mode))
    return found + [Row(*each, sweep=True, series=name) for name, all_of in SWEEP.items() for each in all_of if sweep]


def show(record: dict[str, Any]) -> None:
    """Print a table: one row per codec."""
    from rich.console import Console
    from rich.table import Table

    masks = list(record["rows"][0]["inpaint"])
    table = Table(box=None)
    for column in ("mode", "changes", "bytes", "dB", "sd", "SSIM", *(f"{mask} dB (stock)" for mask in masks)):
        table.add_column(column, justify="left" if column in ("mode", "changes") else "right")
    for row in record["rows"]:
        inpainted = [row["inpaint"][mask] for mask in masks]
        table.add_row(
            row["mode"],
            row["codec"],
            f"{row['bytes_slow_fraction']:.3f}",
            "equal" if row["bit_equal"] else _figure(row["psnr_db_mean"]),
            _figure(row["psnr_db_sd"]),
            f"{row['ssim_mean']:.4f}",
            *(f"{one['psnr_db']:.2f} ({one['psnr_db_stock']:.2f})" for one in inpainted),
        )
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)
    console.print(table)
    if not record["inpaints"]:
        console.print("no inpainting: how this pipeline has its latents between steps is not known")


def _figure(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.1f}"


def draw(record: dict[str, Any], file: Path) -> None:
    """Plot fidelity by bytes: modes as stars, and a colour for each series of a sweep."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullLocator

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    shown = [row for row in record["rows"] if row["psnr_db_mean"] is not None]
    for series in dict.fromkeys(row["series"] for row in shown):
        own = sorted((row for row in shown if row["series"] == series), key=lambda row: row["bytes_slow_fraction"])
        places = [row["bytes_slow_fraction"] for row in own], [row["psnr_db_mean"] for row in own]
        marker, size = (".", 8) if own[0]["sweep"] else ("*", 15)
        axes.plot(*places, marker, markersize=size, label=series)
    axes.set(xscale="log", xlabel="share of exact bytes on slow links", ylabel="PSNR to stock, dB")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:g}")
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(file)


def draw_pictures(gallery: Gallery, file: Path) -> None:
    """Save some pictures of all tasks, or frames of the first video: a row for each mode."""
    rows = {}
    for task, made in gallery.items():
        for name, every in made.items():
            pictures = every if every.ndim == 3 else every[0]
            chosen = np.linspace(0, len(pictures) - 1, min(len(pictures), SHEET_PICTURES)).round().astype(int)
            rows[f"{task} {name}".strip()] = pictures[chosen]
    draw_contact_sheet(rows, file)
