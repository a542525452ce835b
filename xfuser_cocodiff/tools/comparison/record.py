"""Reads the files that the ranks of a launch recorded, and aggregates them over ranks, steps and repeats.

A launch holds runs (pipeline calls). The runs that are compared are its repeats; a repeat is a list over ranks.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeAlias

from xfuser_cocodiff.tools.reporting import record_file

Repeat: TypeAlias = list[dict[str, Any]]
"""One run as each rank recorded it, by rank; :mod:`xfuser_cocodiff.tools.comparison.recorder` describes the fields."""


class RecordError(RuntimeError):
    """Error: the records of a launch are missing or incomplete."""


def read_launches(folder: Path) -> list[list[dict[str, Any]]]:
    """Return the records of all ranks of each launch, by rank, with the `folder` of each.

    Files of ranks lie anywhere below the folder, so that the folders of nodes can be copied into it or merged. Those of
    one rank, sorted by their paths, are its launches.

    Raises:
        RecordError: there are no records, some are missing, or ranks have different numbers of runs.
    """
    by_rank: dict[int, list[dict[str, Any]]] = {}
    try:
        for file in sorted(folder.rglob("rank*.json")):
            one = record_file.read(file)
            by_rank.setdefault(int(one["rank"]), []).append({**one, "folder": file.parent})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{folder}: a rank's record is not valid: {error}") from None
    if not by_rank:
        raise RecordError(
            f"{folder}: no rank recorded a denoising step. Is xfuser-cocodiff installed where the command runs, "
            "and does it call a diffusers pipeline?"
        )
    size = by_rank[min(by_rank)][-1].get("ranks", len(by_rank))
    if missing := sorted({*range(size)} - {*by_rank}):
        raise RecordError(
            f"{folder}: the records of ranks {', '.join(map(str, missing))} of {size} are missing; copy those of all "
            "nodes into the folder"
        )
    launches = [len(by_rank[rank]) for rank in range(size)]
    runs = [[len(one["runs"]) for one in by_rank[rank]] for rank in range(size)]
    if len({*launches}) > 1 or any(each != runs[0] for each in runs):
        raise RecordError(f"{folder}: the records are incomplete; runs by rank and launch: {runs}")
    return [list(launch) for launch in zip(*(by_rank[rank] for rank in range(size)), strict=True)]


def repeats_of(ranks: Sequence[dict[str, Any]]) -> list[Repeat]:
    """Return the runs of a launch that have as many steps as its last one; others only warm up.

    Raises:
        RecordError: the launch has no run.
    """
    runs = [list(of_ranks) for of_ranks in zip(*(one["runs"] for one in ranks), strict=True)]
    if not runs:
        raise RecordError(f"{ranks[0]['folder']}: no run of the pipeline was completed")
    return [run for run in runs if len(run[0]["steps"]) == len(runs[-1][0]["steps"])]


def step_seconds(repeat: Repeat) -> float:
    """Return the step time in seconds: the maximum over ranks, the median over steps.

    The first step does not count, nor do steps with timed communication, which other runs do not have, unless there
    are no others.
    """
    steps = [max(step["seconds"] for step in of_ranks) for of_ranks in _by_step(repeat)]
    return median(_without_first(steps, [not each for each in _timed(repeat)]))


def a2a_seconds(repeats: Sequence[Repeat]) -> dict[str, float]:
    """Return the seconds of a step in collectives, by axis: mean over ranks, median over timed steps and repeats.

    The result is empty at degree 1, and also where collectives run inside a compiled graph, which cannot be timed.
    """
    return {
        axis: median(median(_without_first(*each)) for each in zip(steps, map(_timed, repeats), strict=True))
        for axis, steps in _by_axis(repeats, "a2a_seconds").items()
    }


def codecs(repeats: Sequence[Repeat]) -> dict[str, Any] | None:
    """Return the statistics of lossy compression over all ranks and repeats; None if no compression was active."""
    runs = [run for repeat in repeats for run in repeat]
    if not all(run.get("codecs") for run in runs):
        return None
    steps = [step for run in runs for step in run["codecs"]]
    exact_bytes = sum(step["exact_bytes"] for step in steps)
    if not exact_bytes:  # no layer used the codecs
        return None
    return {
        "bytes_slow_fraction": sum(step["sent_bytes"] for step in steps) / exact_bytes,
        "repeated": sum(step["repeated"] for step in steps),
        "reference_bytes": max(step["reference_bytes"] for step in steps),
    }


def errors(repeats: Sequence[Repeat]) -> dict[str, Any]:
    """Return errors and bits as :class:`RunErrors` names them, each a mean over ranks and repeats."""
    runs = [run for repeat in repeats for run in repeat]
    figures = {key: _mean_of_each({key: run.get(key)} for run in runs).get(key) for key in ("mean_error", "bits")}
    return {**figures, **{key: _mean_of_each(run.get(key, {}) for run in runs) for key in ("error", "yardsticks")}}


def _mean_of_each(figures: Iterable[Mapping[str, float | None]]) -> dict[str, float]:
    """Return the mean of the values of each figure, by its name."""
    by_name: dict[str, list[float]] = {}
    for name, value in (item for each in figures for item in each.items()):
        if value is not None:
            by_name.setdefault(name, []).append(value)
    return {name: fmean(values) for name, values in by_name.items()}


def sent_bytes(repeats: Sequence[Repeat]) -> dict[str, int]:
    """Return the bytes that a rank sends in a step, by axis: mean over ranks, steps and repeats.

    The result is empty in the cases of :func:`a2a_seconds`.
    """
    return {axis: round(fmean(map(fmean, steps))) for axis, steps in _by_axis(repeats, "sent_bytes").items()}


def _by_axis(repeats: Sequence[Repeat], key: str) -> dict[str, list[list[float]]]:
    """Return for each axis and repeat a figure of each step, the mean over ranks."""
    axes = sorted({axis for repeat in repeats for run in repeat for step in run["steps"] for axis in step[key]})

    def of_steps(axis: str, repeat: Repeat) -> list[float]:
        return [fmean(step[key].get(axis, 0) for step in of_ranks) for of_ranks in _by_step(repeat)]

    return {axis: [of_steps(axis, repeat) for repeat in repeats] for axis in axes}


def _by_step(repeat: Repeat) -> Iterable[tuple[dict[str, Any], ...]]:
    """Return what each rank recorded of each step."""
    return zip(*(run["steps"] for run in repeat), strict=True)


def _timed(repeat: Repeat) -> list[bool]:
    """Return for each step whether its communication was timed, as in all steps of earlier records."""
    return [step.get("is_timed", True) for step in repeat[0]["steps"]]


def _without_first(values: list[float], counts: list[bool]) -> list[float]:
    """Return the values of steps that count, without the first step, which is slower than the others.

    If no step but the first counts, all others do; a single step always does.
    """
    return [value for value, each in zip(values[1:], counts[1:], strict=True) if each] or values[1:] or values


def differing(stock: Sequence[Repeat], other: Sequence[Repeat]) -> list[dict[str, int]]:
    """Return the repeats and ranks (from 0) whose final latents are not bit-identical to stock's."""
    return [
        {"repeat": index, "rank": rank}
        for index, (stock_ranks, other_ranks) in enumerate(zip(stock, other, strict=True))
        for rank, (stock_run, other_run) in enumerate(zip(stock_ranks, other_ranks, strict=True))
        if stock_run["latents_sha256"] != other_run["latents_sha256"]
    ]
