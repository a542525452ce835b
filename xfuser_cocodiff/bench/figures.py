"""The figures of the README and of docs/: the runs that they come from, and the tables that they become.

A run leaves a record in a folder. One that is there is not made again, so that what was broken off goes on. Tables are
made of the records that there are, and put into the documents where these have marks for them.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from xfuser_cocodiff.comparison import launch
from xfuser_cocodiff.models.hub import write_cache
from xfuser_cocodiff.reporting.progress import Teller

Record = dict[str, Any]
_STEPS = (50, 20, 8, 4)
_QUALITY_MODELS = ("FLUX.1-dev", "Wan2.1-T2V")
_RINGS = {2: "4 x 2", 4: "2 x 4", 8: "1 x 8"}


@dataclass(frozen=True)
class Run:
    """A command that leaves a record."""

    name: str
    command: tuple[str, ...]
    """Of `cocodiff`, but for --json."""
    minutes: float
    """That it takes on two cores, about."""
    cluster: tuple[str, ...] = ()
    """Arguments of the emulated cluster that it needs; none where it needs none."""

    def arguments(self, folder: Path) -> list[str]:
        """The whole command line."""
        on = [sys.executable, "-m", "xfuser_cocodiff.emulation.cluster", *self.cluster, "--"] if self.cluster else []
        return [*on, sys.executable, "-m", "xfuser_cocodiff.cli", *self.command, "--json", str(self.record(folder))]

    def record(self, folder: Path) -> Path:
        """Where its record is."""
        return folder / f"{self.name}.json"


@dataclass(frozen=True)
class Table:
    """A table of a document."""

    name: str
    document: str
    """From the top of the checkout."""
    runs: tuple[Run, ...]
    markdown: Callable[[Sequence[Record]], list[str]]


def _speed(records: Sequence[Record]) -> list[str]:
    modes = list(dict.fromkeys(mode for _, rows in _by_share(records) for mode in rows if mode != "stock"))
    lines = [f"| share | {' | '.join(f'`{mode}`' for mode in modes)} |", "|---" * (1 + len(modes)) + "|"]
    for stock, rows in _by_share(records):
        cells = [_beside_bound(stock, rows[mode]) if mode in rows else "" for mode in modes]
        lines.append(f"| {_share(rows)} | {' | '.join(cells)} |")
    return lines


def _beside_bound(stock: Sequence[float], row: Record) -> str:
    cell = _with_range(stock, row["step_seconds"])
    if row["mode"] == "paper":  # it sends less and less during a run: one bound would say little
        return cell
    return f"{cell} of {median(stock) / row['bound_seconds']:.2f}"


def _ring(records: Sequence[Record]) -> list[str]:
    lines = ["| Ulysses x Ring | share of stock's step | `exact` | `balanced` |", "|---|---|---|---|"]
    for record in records:
        for stock, rows in _by_share([record]):
            cells = [_with_range(stock, rows[mode]["step_seconds"]) for mode in ("exact", "balanced")]
            lines.append(f"| {_RINGS[rows['exact']['ring']]} | {_share(rows)} | {' | '.join(cells)} |")
    return lines


def _compiled(records: Sequence[Record]) -> list[str]:
    lines = ["| share | stock's step | `exact` | `balanced` |", "|---|---|---|---|"]
    for stock, rows in _by_share(records):
        step = f"{median(stock):.2f} s ({min(stock):.2f} to {max(stock):.2f})"
        cells = [_with_range(stock, rows[mode]["step_seconds"]) for mode in ("exact", "balanced")]
        lines.append(f"| {_share(rows)} | {step} | {' | '.join(cells)} |")
    return lines


def _quality(records: Sequence[Record]) -> list[str]:
    lines = [
        "| model | steps | mode | bytes | PSNR, dB | SSIM | inpainting, dB: block / centre (stock) |",
        "|---|---|---|---|---|---|---|",
    ]
    for record in records:
        model, steps = (_option(record["command"], name) for name in ("--model", "--steps"))
        for row in record["rows"]:
            figures = f"{row['psnr_db_mean']:.1f} ± {row['psnr_db_sd']:.1f} | {row['ssim_mean']:.4f}"
            painted = [f"{each['psnr_db']:.2f} ({each['psnr_db_stock']:.2f})" for each in row["inpaint"].values()]
            known = f"{model} | {steps} | `{row['mode']}` | {row['bytes_slow_fraction']:.3f}"
            lines.append(f"| {known} | {figures} | {' / '.join(painted)} |")
    return lines


def _by_share(records: Sequence[Record]) -> list[tuple[list[float], dict[str, Record]]]:
    """For each share stock's seconds, and the rows of all sides."""
    found = []
    for record in records:
        for asked in dict.fromkeys(row["share_asked"] for row in record["rows"]):
            rows = {row["mode"]: row for row in record["rows"] if row["share_asked"] == asked}
            found.append((rows["stock"]["step_seconds"], rows))
    return found


def _share(rows: dict[str, Record]) -> str:
    return f"{rows['stock']['share']:.2f}"


def _with_range(stock: Sequence[float], seconds: Sequence[float]) -> str:
    ratios = sorted(a / b for a, b in zip(stock, seconds, strict=True))
    return f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def _option(command: str, name: str) -> str:
    words = command.split()
    return words[words.index(name) + 1]


_AURORA = ("--preset", "aurora")
_FIVE = ("bench", "model", "--repeats", "5")
_MODEL = (*_FIVE, "--shape", "low-resolution")
_ALL_MODES = "exact,balanced,fast,paper"
_SPEED = tuple(
    Run(f"speed-{share}", (*_MODEL, "--share", str(share), "--mode", modes), minutes, _AURORA)
    for share, modes, minutes in (
        (0.65, _ALL_MODES, 7),
        (0.8, _ALL_MODES, 9),
        (0.91, _ALL_MODES, 17),
        (0.97, "exact,balanced,fast", 45),  # the paper's mode alone would take as long again
    )
)
_RESOLUTION = Run(
    "resolution",
    (*_FIVE, "--shape", "high-resolution", "--share", "0.65,0.8", "--mode", "exact,balanced,fast"),
    52,
    _AURORA,
)
_EQUAL = Run("equal", (*_MODEL, "--share", "0.2,0.5", "--mode", "exact,balanced"), 6, ("--preset", "flat"))
_EXACT_AND_CODED = ("--share", "0.5,0.65,0.8,0.9", "--mode", "exact,balanced")
_RING = tuple(Run(f"ring-{ring}", (*_MODEL, "--ring", str(ring), *_EXACT_AND_CODED), 20, _AURORA) for ring in _RINGS)
_COMPILED = Run(
    "compiled",
    (*_MODEL, "--compile", *_EXACT_AND_CODED),
    25,
    ("--preset", "ethernet", "--topology", "node=2,gpu=2"),
)
_QUALITY = tuple(
    Run(
        f"quality-{model}-{steps}",
        ("quality", "--model", model, "--steps", str(steps), *(["--no_inpainting"] if steps < max(_STEPS) else [])),
        0.04 * steps * (4 if model == _QUALITY_MODELS[0] and steps == max(_STEPS) else 2),
    )
    for model in _QUALITY_MODELS
    for steps in _STEPS
)
TABLES = (
    Table("speed", "README.md", _SPEED, _speed),
    Table("resolution", "docs/overlap.md", (_RESOLUTION,), _speed),
    Table("equal", "docs/overlap.md", (_EQUAL,), _speed),
    Table("ring", "docs/ring.md", _RING, _ring),
    Table("compiled", "docs/compiled_graphs.md", (_COMPILED,), _compiled),
    Table("quality", "docs/codecs.md", _QUALITY, _quality),
)


def chosen(text: str | None) -> list[Table]:
    """Tables by their names, as 'speed,ring'; all of them where none is given.

    Raises:
        ValueError: an unknown name.
    """
    known = {table.name: table for table in TABLES}
    names = text.split(",") if text else list(known)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--only {unknown[0]!r} is not known; valid are {', '.join(known)}")
    return [known[name] for name in names]


def make(tables: Sequence[Table], folder: Path) -> list[Run]:
    """Make the records that are not there yet, and return the runs that failed; their output is beside the records.

    Args:
        tables: whose runs.
        folder: of the records.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [run for table in tables for run in table.runs if not run.record(folder).exists()]
    told = Teller(sys.stderr)
    told.foresee({run.name: (1, 60 * run.minutes) for run in missing})
    failed, environment = [], dict(os.environ)
    if not all(run.cluster for run in missing):  # it loads a model, on one core
        write_cache(folder / "models", _QUALITY_MODELS)
        models = {"HF_HOME": str(folder / "models"), "HF_HUB_OFFLINE": "1"}
        environment |= {**models, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for run in missing:
        told.begin(run.name, run.name)
        if _status(run.arguments(folder), environment, folder / f"{run.name}.log") or not run.record(folder).exists():
            failed.append(run)
        told.advance()
    told.end()
    return failed


def _status(command: Sequence[str], environment: Mapping[str, str], log: Path) -> int:
    """Run a command to its end, which comes with ours, and return its exit status."""
    with launch.stopped_by_sigterm(), log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            return process.wait()
        finally:  # a cluster takes its network down
            launch.stop(process)


def markdown(table: Table, folder: Path) -> str | None:
    """The table of what is in a folder; None where a record is missing."""
    files = [run.record(folder) for run in table.runs]
    if not all(file.exists() for file in files):
        return None
    return "\n".join(table.markdown([json.loads(file.read_text()) for file in files]))


def put_into(document: Path, name: str, text: str) -> None:
    """Put another table between the marks of a name in a document.

    Raises:
        OSError: it cannot be read or written.
        ValueError: it has no such marks, or several.
    """
    begin, end = f"<!-- figure: {name} -->\n", "\n<!-- end of figure -->"
    pattern = re.compile(f"({re.escape(begin)}).*?({re.escape(end)})", re.DOTALL)
    changed, count = pattern.subn(lambda found: f"{found[1]}\n{text}\n{found[2]}", document.read_text())
    if count != 1:
        raise ValueError(f"it has {count} places for the figure {name!r}, in place of one")
    document.write_text(changed)
