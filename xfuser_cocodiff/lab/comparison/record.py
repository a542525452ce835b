"""Reads what the ranks of a launch recorded, and makes the figures of a run from it.

A launch holds runs (pipeline calls); the runs that are compared are its repeats. Here a repeat is a list over ranks.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeAlias

Repeat: TypeAlias = list[dict[str, Any]]
"""One run as each rank saw it, by rank; the layout is that of :mod:`xfuser_cocodiff.lab.comparison.recorder`."""


class RecordError(RuntimeError):
    """A launch left no record that can be used."""


def read_ranks(folder: Path) -> list[dict[str, Any]]:
    """What every rank of a launch left, by rank.

    Raises:
        RecordError: there is nothing, or the ranks disagree on how many runs there were.
    """
    ranks = sorted((json.loads(file.read_text()) for file in folder.glob("rank*.json")), key=lambda one: one["rank"])
    if not ranks:
        raise RecordError(
            f"{folder}: no rank recorded a denoising step. Is xfuser-cocodiff installed where the command runs, "
            "and does it call a diffusers pipeline?"
        )
    counts = {len(one["runs"]) for one in ranks}
    if len(counts) != 1 or [one["rank"] for one in ranks] != list(range(len(ranks))):
        raise RecordError(f"{folder}: the ranks' records do not belong together ({len(ranks)} ranks, runs: {counts})")
    return ranks


def last_repeats(ranks: Sequence[dict[str, Any]], count: int) -> list[Repeat]:
    """The last `count` runs of a launch; those before them warmed it up.

    Raises:
        RecordError: there were fewer.
    """
    found = len(ranks[0]["runs"])
    if found < count:
        raise RecordError(f"expected {count} runs of the pipeline, recorded {found}")
    return [[one["runs"][index] for one in ranks] for index in range(found - count, found)]


def step_seconds(repeat: Repeat) -> float:
    """Median seconds of a step on the rank that took longest, less the first one where there are more."""
    return median(_settled([max(of_ranks) for of_ranks in _by_step(repeat, lambda step: step["seconds"])]))


def a2a_seconds(repeats: Sequence[Repeat]) -> dict[str, float]:
    """Seconds of a step in collectives, per axis: mean over ranks, median over steps, median over repeats.

    Empty where nothing was seen: at degree 1, but also where the exchange runs inside a compiled graph.
    """
    return _per_axis(repeats, "a2a_seconds", lambda steps: median(_settled(steps)), median)


def seconds(repeats: Sequence[Repeat], key: str) -> float | None:
    """A figure in seconds of a step, aggregated as :func:`a2a_seconds`; None where the ranks could not tell."""
    if any(step[key] is None for repeat in repeats for run in repeat for step in run["steps"]):
        return None
    return median(median(_settled(_mean_by_step(repeat, lambda step: step[key]))) for repeat in repeats)


def codecs(repeats: Sequence[Repeat]) -> dict[str, Any] | None:
    """What codecs did, over all ranks and repeats; None where everything travelled exactly."""
    runs = [run for repeat in repeats for run in repeat]
    if not all(run.get("codecs") for run in runs):
        return None
    steps = [step for run in runs for step in run["codecs"]]
    exact_bytes = sum(step["exact_bytes"] for step in steps)
    if not exact_bytes:  # no layer was met
        return None
    return {
        "bytes_slow_fraction": sum(step["sent_bytes"] for step in steps) / exact_bytes,
        "repeated": sum(step["repeated"] for step in steps),
        "reference_bytes": max(step["reference_bytes"] for step in steps),
    }


def sent_bytes(repeats: Sequence[Repeat]) -> dict[str, int]:
    """Bytes that a rank sends in a step, per axis: mean over ranks, steps and repeats. Empty as above."""
    return {axis: round(count) for axis, count in _per_axis(repeats, "sent_bytes", fmean, fmean).items()}


def _per_axis(repeats: Sequence[Repeat], key: str, over_steps: Callable, over_repeats: Callable) -> dict[str, float]:
    axes = sorted({axis for repeat in repeats for run in repeat for step in run["steps"] for axis in step[key]})

    def figure(axis: str) -> float:
        found = (_mean_by_step(repeat, lambda step: step[key].get(axis, 0)) for repeat in repeats)
        return over_repeats(map(over_steps, found))

    return {axis: figure(axis) for axis in axes}


def _mean_by_step(repeat: Repeat, value: Callable[[dict], float]) -> list[float]:
    return [fmean(values) for values in _by_step(repeat, value)]


def _by_step(repeat: Repeat, value: Callable[[dict], float]) -> list[tuple[float, ...]]:
    return list(zip(*([value(step) for step in run["steps"]] for run in repeat), strict=True))


def _settled(values: list[float]) -> list[float]:
    return values[1:] or values


def differing(stock: Sequence[Repeat], other: Sequence[Repeat]) -> list[dict[str, int]]:
    """Repeats and ranks (counted from 0) whose final latents are not stock's bit for bit."""
    return [
        {"repeat": index, "rank": rank}
        for index, (ours, theirs) in enumerate(zip(stock, other, strict=True))
        for rank, (mine, its) in enumerate(zip(ours, theirs, strict=True))
        if mine["latents_sha256"] != its["latents_sha256"]
    ]
