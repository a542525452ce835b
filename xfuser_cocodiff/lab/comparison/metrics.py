"""Computes the metrics of one variant of a comparison from the records of its launches."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from xfuser_cocodiff.lab.comparison import fidelity, record


@dataclass(frozen=True)
class VariantResult:
    """Records of all launches of one variant."""

    folder: Path
    """Folder of the last launch, with its latents and picture."""

    settings: dict[str, Any]
    """Degree, topology, exchange of each axis and device, as rank 0 recorded them."""

    repeats: list[record.Repeat]

    @classmethod
    def read(cls, folders: Sequence[Path], repeats_per_launch: int) -> "VariantResult":
        """Read the last runs of each launch.

        Raises:
            RecordError: a launch has fewer runs than `repeats_per_launch`.
        """
        launches = [record.read_ranks(folder) for folder in folders]
        repeats = [one for ranks in launches for one in record.last_repeats(ranks, repeats_per_launch)]
        return cls(folders[-1], launches[-1][0], repeats)

    @property
    def picture(self) -> Path | None:
        """Picture of the lowest rank that saved one."""
        files = (self.folder / f"picture{rank}.png" for rank in range(len(self.repeats[0])))
        return next(filter(Path.exists, files), None)

    @property
    def runs(self) -> list[dict[str, Any]]:
        """All runs of all ranks."""
        return [run for repeat in self.repeats for run in repeat]

    @property
    def step_seconds(self) -> list[float]:
        """Step time of each repeat, in seconds."""
        return [record.step_seconds(repeat) for repeat in self.repeats]


def compute_metrics(variant: VariantResult, stock: VariantResult, out: Path) -> dict[str, Any]:
    """Return the metrics of one run of the compare record; the caller adds its name and command.

    Args:
        variant: stock itself, or a variant to compare to it.
        stock: the baseline, with as many repeats.
        out: folder to which paths are relative.

    Raises:
        RecordError: the two variants have different numbers of ranks.
    """
    if len(variant.repeats[0]) != len(stock.repeats[0]):
        raise record.RecordError("the two variants ran on different numbers of ranks")
    seconds = variant.step_seconds
    return {
        "topology": variant.settings["topology"],
        "slow_axes": variant.settings.get("slow_axes", []),
        "exchange": variant.settings.get("exchange", {}),
        "device": variant.settings["device"],
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


def _communication(variant: VariantResult) -> dict[str, Any]:
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


def _compression(variant: VariantResult) -> dict[str, Any]:
    """Return the compressed fraction, and the recorder's reason where compression was inactive."""
    codecs, runs = record.codecs(variant.repeats), variant.runs
    fraction = codecs["bytes_slow_fraction"] if codecs else runs[0].get("coded_fraction")
    reason = next(filter(None, (run.get("coded_reason") for run in runs)), None)
    return {"codecs": codecs, "coded_fraction": fraction, "coded_reason": reason}


def _compare_latents(variant: VariantResult, stock: VariantResult) -> dict[str, Any]:
    differing = record.differing(stock.repeats, variant.repeats)
    return {
        "bit_equal": not differing,
        **fidelity.compare_latents(*(one.folder / "latents.safetensors" for one in (stock, variant))),
        "differs_at": differing,
        "repeatable": not any(record.differing(variant.repeats[:1], [repeat]) for repeat in variant.repeats),
    }


def _compare_images(variant: VariantResult, stock: VariantResult, out: Path) -> dict[str, Any]:
    path = variant.picture.relative_to(out).as_posix() if variant.picture else None
    return {**fidelity.compare_pictures(stock.picture, variant.picture), "path": path}
