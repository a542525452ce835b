"""The figures of one side of a comparison, from what its launches recorded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from xfuser_cocodiff.lab.comparison import fidelity, record


@dataclass(frozen=True)
class Outcome:
    """What the launches of one side recorded."""

    folder: Path
    """Of the last launch, with its latents and picture."""

    engine: dict[str, Any]
    """What rank 0 says of degree, topology and device."""

    repeats: list[record.Repeat]

    @classmethod
    def read(cls, folders: Sequence[Path], repeats_per_launch: int) -> "Outcome":
        """Read the last runs of each launch; raises RecordError where there are fewer."""
        launches = [record.read_ranks(folder) for folder in folders]
        repeats = [one for ranks in launches for one in record.last_repeats(ranks, repeats_per_launch)]
        return cls(folders[-1], launches[-1][0], repeats)

    @property
    def picture(self) -> Path | None:
        """That of the lowest rank that has one."""
        files = (self.folder / f"picture{rank}.png" for rank in range(len(self.repeats[0])))
        return next(filter(Path.exists, files), None)

    @property
    def runs(self) -> list[dict[str, Any]]:
        """Every run of every rank."""
        return [run for repeat in self.repeats for run in repeat]

    @property
    def step_seconds(self) -> list[float]:
        """One per repeat."""
        return [record.step_seconds(repeat) for repeat in self.repeats]


def figures(side: Outcome, stock: Outcome, out: Path) -> dict[str, Any]:
    """Everything that a run of the compare record says, less its name and command.

    Args:
        side: stock itself, or what is compared to it.
        stock: the reference, with as many repeats.
        out: folder to which paths are relative.

    Raises:
        RecordError: the two sides have different numbers of ranks.
    """
    if len(side.repeats[0]) != len(stock.repeats[0]):
        raise record.RecordError("the two sides ran on different numbers of ranks")
    seconds = side.step_seconds
    return {
        "topology": side.engine["topology"],
        "device": side.engine["device"],
        "step_seconds": seconds,
        "step_seconds_spread": {"median": median(seconds), "min": min(seconds), "max": max(seconds)},
        "ratio_to_stock": median(seconds) / median(stock.step_seconds),
        **_traffic(side),
        **_coding(side),
        "peak_memory_bytes": max(run["peak_memory_bytes"] for run in side.runs),
        "latents": _latents(side, stock),
        "image": _image(side, stock, out),
    }


def _traffic(side: Outcome) -> dict[str, Any]:
    """Return what was moved, and for how long: one definition of in flight and hidden, for the table and the chart.

    Axes sum to the whole, which is apportioned to them by the time of their collectives.
    """
    collectives, sent = record.a2a_seconds(side.repeats), record.sent_bytes(side.repeats)
    # A compiled graph exchanges unseen, which is not the same as not exchanging.
    if not sent and side.engine["degree"] != 1:
        return dict.fromkeys(("a2a_seconds", "a2a_seconds_by_axis", "hidden_seconds", "bytes"))
    in_collectives = sum(collectives.values())
    in_flight = record.seconds(side.repeats, "in_flight_seconds") or in_collectives
    share = in_flight / in_collectives if in_collectives else 0.0
    return {
        "a2a_seconds": in_flight,
        "a2a_seconds_by_axis": {axis: share * seconds for axis, seconds in collectives.items()},
        "hidden_seconds": record.seconds(side.repeats, "hidden_seconds"),
        "bytes": sent,
    }


def _coding(side: Outcome) -> dict[str, Any]:
    """Return what codecs did, or why they did nothing in the recorder's words."""
    codecs, runs = record.codecs(side.repeats), side.runs
    fraction = codecs["bytes_slow_fraction"] if codecs else runs[0].get("coded_fraction")
    reason = next(filter(None, (run.get("coded_reason") for run in runs)), None)
    return {"codecs": codecs, "coded_fraction": fraction, "coded_reason": reason}


def _latents(side: Outcome, stock: Outcome) -> dict[str, Any]:
    differing = record.differing(stock.repeats, side.repeats)
    return {
        "bit_equal": not differing,
        **fidelity.compare_latents(*(one.folder / "latents.safetensors" for one in (stock, side))),
        "differs_at": differing,
        "repeatable": not any(record.differing(side.repeats[:1], [repeat]) for repeat in side.repeats),
    }


def _image(side: Outcome, stock: Outcome, out: Path) -> dict[str, Any]:
    path = side.picture.relative_to(out).as_posix() if side.picture else None
    return {**fidelity.compare_pictures(stock.picture, side.picture), "path": path}
