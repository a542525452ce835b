"""Compares recorded runs of one command: of stock xDiT, and of the plugin."""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from xfuser_cocodiff.tools.comparison import fidelity, record
from xfuser_cocodiff.tools.comparison.launch import STOCK
from xfuser_cocodiff.tools.launching import command_line
from xfuser_cocodiff.tools.reporting import record_header


@dataclass(frozen=True)
class RecordedRuns:
    """The compared runs of one variant."""

    folder: Path
    """Folder with the records of all launches."""
    ranks: Sequence[Mapping[str, Any]]
    """Records of all ranks of the last launch."""
    repeats: list[record.Repeat]

    @classmethod
    def read(cls, folder: Path, count: int | None) -> "RecordedRuns":
        """Read the last `count` runs, all if None: the last one of each launch, or those of a single launch.

        Raises:
            RecordError: records are missing or not complete.
        """
        launches = record.read_launches(folder)
        runs = [record.repeats_of(ranks) for ranks in launches]
        repeats = runs[0] if len(runs) == 1 else [of_launch[-1] for of_launch in runs]
        return cls(folder, launches[-1], repeats[-count:] if count else repeats)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Degrees, mode, topology, collectives of each axis, device and command line, as rank 0 recorded them."""
        return self.ranks[0]

    @property
    def image(self) -> Path | None:
        """Image of the lowest rank that saved one."""
        files = (one["folder"] / f"image{one['rank']}.png" for one in self.ranks)
        return next(filter(Path.exists, files), None)

    @property
    def runs(self) -> list[dict[str, Any]]:
        """All runs of all ranks."""
        return [run for repeat in self.repeats for run in repeat]

    @property
    def step_seconds(self) -> list[float]:
        """Step time of each repeat, in seconds."""
        return [record.step_seconds(repeat) for repeat in self.repeats]


def compare(folders: Sequence[Path], out: Path, repeats: int) -> dict[str, Any]:
    """Return the record of a comparison.

    Args:
        folders: folders of records, of stock and of each variant of the plugin. Files of all ranks lie anywhere below;
            those of one rank, sorted by their paths, are its launches.
        out: folder of the report, to which paths in the record are relative.
        repeats: largest number of runs of each variant that are compared, the last ones.

    Raises:
        RecordError: records are missing, not complete, or not of the same command.
    """
    available = min(len(RecordedRuns.read(folder, None).repeats) for folder in folders)
    stock, *plugins = variants = [RecordedRuns.read(folder, min(repeats, available)) for folder in folders]
    if mode := stock.settings.get("mode"):
        raise record.RecordError(f"{stock.folder}: recorded in mode {mode}; the first folder must be of stock xDiT")
    for variant in plugins:
        pairs = (variant.ranks, stock.ranks, "ranks"), (variant.runs[-1]["steps"], stock.runs[-1]["steps"], "steps")
        for own, of_stock, what in pairs:
            if len(own) != len(of_stock):
                counts = f"{len(own)} {what}, and {len(of_stock)} in {stock.folder}"
                raise record.RecordError(f"{variant.folder}: {counts}; record the same command twice")
    return {
        **record_header.header(),
        "host": stock.settings.get("host") or record_header.header()["host"],
        "repeats": len(stock.repeats),
        "cluster": stock.settings.get("cluster"),
        "runs": [
            {"name": name, **_metrics(variant, stock, out)}
            for name, variant in zip(_names(plugins), variants, strict=True)
        ],
    }


def _names(plugins: Sequence[RecordedRuns]) -> list[str]:
    """Return the names of stock and of the variants: modes, and folders where they do not tell them apart."""
    names = [variant.settings.get("mode") or variant.folder.name for variant in plugins]
    pairs = zip(names, (variant.folder.name for variant in plugins), strict=True)
    return [STOCK, *(f"{name} ({folder})" if names.count(name) > 1 else name for name, folder in pairs)]


def _metrics(variant: RecordedRuns, stock: RecordedRuns, out: Path) -> dict[str, Any]:
    """Return the metrics of one run of the record; the caller adds its name."""
    seconds, settings, arguments = variant.step_seconds, variant.settings, variant.settings.get("arguments", [])
    return {
        "model": command_line.option_value(arguments, "model"),
        "degree": settings["degree"],
        "ring_degree": settings.get("ring_degree", 1),
        "command": shlex.join(arguments),
        "topology": settings["topology"],
        "slow_axes": settings.get("slow_axes", []),
        "exchange": settings.get("exchange", {}),
        "device": settings["device"],
        "step_seconds": seconds,
        "step_seconds_spread": {"median": median(seconds), "min": min(seconds), "max": max(seconds)},
        "ratio_to_stock": median(seconds) / median(stock.step_seconds),
        **_communication(variant),
        **_compression(variant),
        **record.errors(variant.repeats),
        "peak_memory_bytes": max(run["peak_memory_bytes"] for run in variant.runs),
        "latents": _compare_latents(variant, stock),
        "image": _compare_images(variant, stock, out),
    }


def _communication(variant: RecordedRuns) -> dict[str, Any]:
    """Return bytes and seconds of communication per step; the table and the chart of the report both use them."""
    seconds, sent = record.a2a_seconds(variant.repeats), record.sent_bytes(variant.repeats)
    # Communication inside a compiled graph cannot be counted; that is null, and not zero.
    if not sent and variant.settings["degree"] != 1:
        return dict.fromkeys(("a2a_seconds", "a2a_seconds_by_axis", "hidden_seconds", "bytes"))
    return {
        "a2a_seconds": sum(seconds.values()),
        "a2a_seconds_by_axis": seconds,
        "hidden_seconds": None,  # not measured
        "bytes": sent,
    }


def _compression(variant: RecordedRuns) -> dict[str, Any]:
    """Return the compressed fraction, and the recorder's reason where compression was inactive."""
    codecs, runs = record.codecs(variant.repeats), variant.runs
    fraction = codecs["bytes_slow_fraction"] if codecs else runs[0].get("coded_fraction")
    reason = next(filter(None, (run.get("coded_reason") for run in runs)), None)
    return {"codecs": codecs, "coded_fraction": fraction, "coded_reason": reason}


def _compare_latents(variant: RecordedRuns, stock: RecordedRuns) -> dict[str, Any]:
    differing = record.differing(stock.repeats, variant.repeats)
    return {
        "bit_equal": not differing,
        **fidelity.compare_latents(*(each.ranks[0]["folder"] / "latents.safetensors" for each in (stock, variant))),
        "differs_at": differing,
        "repeatable": not any(record.differing(variant.repeats[:1], [repeat]) for repeat in variant.repeats),
    }


def _compare_images(variant: RecordedRuns, stock: RecordedRuns, out: Path) -> dict[str, Any]:
    path = Path(os.path.relpath(variant.image, out)).as_posix() if variant.image else None
    return {**fidelity.compare_images(stock.image, variant.image), "path": path}
