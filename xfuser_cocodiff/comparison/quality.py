"""`cocodiff quality`: bytes on slow links against fidelity, for modes and codecs, against exact runs at the same seeds.

Virtual ranks on one real one apply what codecs would do among many. The task of the paper is inpainting, where what was
to be found is judged against the truth.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import torch

from xfuser_cocodiff.codec.modes import CodecSchedule
from xfuser_cocodiff.comparison import fidelity, inpainting
from xfuser_cocodiff.comparison.picture import draw_sheet
from xfuser_cocodiff.models import captions, slices
from xfuser_cocodiff.reporting import host
from xfuser_cocodiff.settings.config import CocoDiffConfig
from xfuser_cocodiff.settings.options import EXACT, MODES
from xfuser_cocodiff.xdit.launching.solo import Solo

SWEEP = (
    *(("balanced", f"bits={bits},bits_o={bits},predictor=0") for bits in (8, 4, 2, 1)),
    *(("balanced", f"bits={bits},bits_o={bits}") for bits in (8, 4, 2, 1)),
    *(
        ("balanced", f"bits={bits},bits_o={o},cached={c}")
        for c in (0.25, 0.5, 0.75)
        for bits, o in ((4, 2), (2, 2), (2, 1))
    ),
    *(("paper", f"refresh={refresh},score={score}") for refresh in (0, 10) for score in ("change", "drift", "random")),
)
"""Modes and changes to their schedules."""
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
SHEET_PICTURES = 6
SLICE, PHOTO = "a slice of {}", "a photo of {}"
"""Prompts, as the small trained model knows them."""
_TEXT_TOKENS = 32


@dataclass(frozen=True)
class Row:
    """One codec to judge."""

    mode: str
    schedule: str | None
    sweep: bool

    def __str__(self) -> str:
        return " ".join(filter(None, (self.mode, self.schedule)))


@dataclass
class Pictures:
    """What a run made: grey values from 0 to 1, (N, height, width), and its share of the exact bytes on slow links."""

    values: np.ndarray
    bytes_slow_fraction: float


class Judge:
    """Runs a model and compares what comes of it.

    Args:
        model: its name in xDiT's registry.
        config: virtual ranks, and what else is the same for all codecs.
        seeds: how many pictures, each from a seed of its own.
        steps: of each run.
        size: of the pictures, in pixels.
        dtype: of weights and activations.
        after_step: called after each step of a run.
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
    ) -> None:
        self._solo, self._config, self._after_step = Solo(model, dtype), config, after_step
        self._seeds, self._steps, self._size = seeds, steps, size
        kinds = [slices.KINDS[seed % len(slices.KINDS)] for seed in range(seeds)]
        self._of_slices = [SLICE.format(captions.SLICES[kind]) for kind in kinds]
        every = [SLICE.format(name) for name in captions.SLICES.values()]
        every += [PHOTO.format(name) for name in captions.PHOTOS.values()]
        self._prompts = [every[seed % len(every)] for seed in range(seeds)]
        pictures = [slices.draw(kind, size, np.random.default_rng(1000 + seed)) for seed, kind in enumerate(kinds)]
        self._truth = np.stack(pictures)

    @property
    def inpaints(self) -> bool:
        """Whether it is known how to put known pixels back into latents of the model."""
        return inpainting.layout(self._solo.pipe) is not None

    def generate(self, row: Row) -> Pictures:
        """Pictures from noise."""
        return self._run(row, self._prompts)

    def inpaint(self, row: Row, mask: str) -> Pictures:
        """Pictures of which what the mask leaves is known."""
        keep = inpainting.keep_known(self._solo.pipe, *self.truth(mask))
        return self._run(row, self._of_slices, keep)

    def truth(self, mask: str) -> tuple[np.ndarray, np.ndarray]:
        """The true pictures, and where they are to be found."""
        return self._truth, inpainting.mask(mask, self._size)

    def _run(self, row: Row, prompts: list[str], keep: Callable[..., dict[str, Any]] | None = None) -> Pictures:
        def after_step(*step: Any) -> dict[str, Any]:
            self._after_step()
            return keep(*step) if keep else {}

        approximated = replace(self._config, mode=row.mode, schedule=row.schedule)
        self._solo.use(None if row.mode == EXACT else approximated)
        generators = [torch.Generator().manual_seed(seed) for seed in range(self._seeds)]
        size = {"height": self._size, "width": self._size}
        more = {"callback_on_step_end": after_step} if self._solo.takes("callback_on_step_end") else {}
        output = self._solo(prompts, self._steps, _TEXT_TOKENS, generator=generators, output_type="np", **size, **more)
        pictures = output.images
        reports = self._solo.reports
        exact = sum(report.exact_bytes for report in reports)
        fraction = sum(report.sent_bytes for report in reports) / exact if exact else 1.0
        return Pictures(np.asarray(pictures).mean(-1), fraction)


Gallery = dict[str, dict[str, np.ndarray]]
"""Pictures (N, height, width) by task, that is generation or a mask, and by what made them."""


def measure(
    judge: Judge, rows: Sequence[Row], masks: Sequence[str], show: Callable[[str], None]
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
                "codec": row.schedule or "",
                "bytes_slow_fraction": made[""].bytes_slow_fraction,
                **_fidelity(made[""].values, stock[""].values),
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
    return {**host.header(), "seeds": len(stock[""].values), "rows": found}, gallery


def _fidelity(found: np.ndarray, wanted: np.ndarray) -> dict[str, float | None]:
    """To stock's pictures, over all seeds."""
    decibels = _decibels(wanted, found)
    return {
        "bit_equal": bool(np.array_equal(wanted, found)),
        "psnr_db_mean": fmean(decibels) if decibels else None,
        "psnr_db_sd": stdev(decibels) if len(decibels) > 1 else None,
        "ssim_mean": fmean(_ssim(a, b) for a, b in zip(wanted, found, strict=True)),
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
    """PSNR of each picture; those that are equal have none."""
    found = (fidelity.psnr_db(a, b, 1.0) for a, b in zip(references, others, strict=True))
    return [value for value in found if value is not None]


def _ssim(reference: np.ndarray, other: np.ndarray) -> float:
    from skimage.metrics import structural_similarity

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
        found.append(Row(mode, changes, sweep=bool(changes)))
    return found + [Row(mode, schedule, sweep=True) for mode, schedule in SWEEP if sweep]


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
            *("-" if row[key] is None else f"{row[key]:.1f}" for key in ("psnr_db_mean", "psnr_db_sd")),
            f"{row['ssim_mean']:.4f}",
            *(f"{one['psnr_db']:.2f} ({one['psnr_db_stock']:.2f})" for one in inpainted),
        )
    Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200).print(table)


def draw(record: dict[str, Any], file: Path) -> None:
    """Plot fidelity by bytes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for sweep, marker in ((True, "."), (False, "*")):
        chosen = [row for row in record["rows"] if row["sweep"] == sweep and row["psnr_db_mean"] is not None]
        for mode in dict.fromkeys(row["mode"] for row in chosen):
            own = [row for row in chosen if row["mode"] == mode]
            places = [row["bytes_slow_fraction"] for row in own], [row["psnr_db_mean"] for row in own]
            axes.scatter(*places, marker=marker, s=40 if sweep else 160, label=f"{mode}, changed" if sweep else mode)
    axes.set(xscale="log", xlabel="share of exact bytes on slow links", ylabel="PSNR to stock, dB")
    axes.legend()
    figure.savefig(file)


def draw_pictures(gallery: Gallery, file: Path) -> None:
    """Save pictures of all tasks: a row for each mode, a column for each seed."""
    rows = {
        f"{task} {name}".strip(): pictures[:SHEET_PICTURES]
        for task, made in gallery.items()
        for name, pictures in made.items()
    }
    draw_sheet(rows, file)
