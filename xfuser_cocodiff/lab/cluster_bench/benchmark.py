"""The record of `cocodiff bench cluster`: cells one after the other, each recorded, measured and checked."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xfuser_cocodiff.engine.topology.topology import FLAT, Topology
from xfuser_cocodiff.lab.cluster_bench import cell_rows
from xfuser_cocodiff.lab.cluster_bench.cell import Cell
from xfuser_cocodiff.lab.cluster_bench.cell_rows import RecordedVariant
from xfuser_cocodiff.lab.cluster_bench.coded_exchange import coded_exchanges
from xfuser_cocodiff.lab.cluster_bench.measurement import SLOWER, Speed, measure_split
from xfuser_cocodiff.lab.cluster_bench.quality_record import QualityRecord
from xfuser_cocodiff.lab.cluster_bench.recording import RecordedSplit, record_split
from xfuser_cocodiff.lab.cluster_bench.requested_cells import RequestedCell, add_modes
from xfuser_cocodiff.lab.cluster_bench.speed_choice import choose_speed
from xfuser_cocodiff.lab.cluster_bench.variants import BEST_MODES, BEST_STOCK, Variant
from xfuser_cocodiff.lab.emulation import namespaces
from xfuser_cocodiff.lab.emulation.forked_ranks import run_forked
from xfuser_cocodiff.lab.emulation.links import Cluster
from xfuser_cocodiff.lab.launching import transformer_wrappers
from xfuser_cocodiff.lab.reporting import record_file
from xfuser_cocodiff.lab.reporting.progress import ProgressReporter, format_remaining
from xfuser_cocodiff.xdit.settings.ring_placement import UlyssesRingSplit

_KEY = (
    *("machine", "nodes", "model", "resolution", "batch", "text_tokens"),
    *("launch_us", "predicted", "requested_dilation", "slow_axes"),
)
"""Fields by which a cell of an earlier record is recognized. The number of recorded blocks is none of them: it changes
how a cell is measured, not which cell it is, so that a record has one cell for both numbers."""

_LARGEST_RATIO = 1.5
"""Dilation that a variant needs over the lowest needed one up to which variants are measured together."""
_ITEMS_OF_A_RUN = 4
"""A variant is recorded in 1.5 s; its one or two steps, which take 6 s, run `repeats` times, and once half as fast."""


@dataclass(frozen=True)
class Conditions:
    """How cells are measured."""

    dilation: float | None = None
    """None to choose it for each cell."""
    repeats: int = 3
    predicts: bool = False
    """Whether steps are only recorded and predicted."""
    quality: QualityRecord = field(default_factory=QualityRecord)

    @property
    def items(self) -> int:
        """Work items of a variant, each of the time in which it is recorded."""
        return 1 if self.predicts else 1 + _ITEMS_OF_A_RUN * (self.repeats + 2)


def check_machine() -> None:
    """Start two ranks of an emulated cluster, so that a machine without namespaces is an error before a measurement.

    Raises:
        RuntimeError: this machine cannot emulate clusters.
    """
    topology = Topology.flat(2)
    cluster = Cluster(topology, {FLAT: 1.0}, tuple(map(namespaces.address, range(topology.size))))
    run_forked(cluster, lambda rank: None)


def run(requested: RequestedCell, conditions: Conditions, progress: ProgressReporter | None = None) -> dict[str, Any]:
    """Return a cell of the record.

    Args:
        requested: the cell and its variants.
        conditions: how to measure it.
        progress: advances by the items of :attr:`Conditions.items` for each variant.

    Raises:
        RuntimeError: a variant cannot be recorded, or the cluster cannot be emulated on this machine.
        RankFailedError: a rank failed.
    """
    progress = progress or ProgressReporter(None)
    cell, described = requested.cell, _describe(requested, conditions)
    if requested.problem:
        _advance(progress, conditions.items * len(requested.variants))
        return {**described, "problem": requested.problem, "rows": []}
    transformer_wrappers.preload(cell.model)
    splits = variants_by_split(requested.variants)
    recorded: dict[UlyssesRingSplit, RecordedSplit] = {}
    for split, variants in splits.items():
        progress.report(f"{_title(cell)}: record {', '.join(each.name for each in variants)}")
        recorded[split] = record_split(cell, split, variants)
        _advance(progress, len(variants))
    known = [each for split in splits for each in cell_rows.recorded_variants(cell, recorded[split], splits[split])]
    in_splits = _variants_in_splits(requested)
    if conditions.predicts:
        rows = [cell_rows.predicted_row(each, conditions.quality) for each in known]
        return {**described, "problem": None, "rows": cell_rows.compare(rows, in_splits)}
    worth_measuring = cell_rows.worth_measuring(known)
    rows = [cell_rows.predicted_row(each, conditions.quality) for each in known if each not in worth_measuring]
    _advance(progress, (conditions.items - 1) * len(rows))
    for group in _similar(worth_measuring, conditions):
        speed, split = _speed(cell, group, conditions), group[0].variant.split
        names = ", ".join(each.variant.name for each in group)
        duration = format_remaining(_expected_seconds(group, speed))
        progress.report(f"{_title(cell)}: measure {names} for {duration} at a dilation of {speed.dilation:g}")
        rows += _measured_rows(group, recorded[split].counts, speed, conditions)
        _advance(progress, (conditions.items - 1) * len(group))
    order = [each.variant.name for each in known]
    rows.sort(key=lambda row: order.index(row["mode"]))
    return {**described, "problem": None, "rows": cell_rows.compare(rows, in_splits)}


def _expected_seconds(variants: Sequence[RecordedVariant], speed: Speed) -> float:
    """Return the time in which variants are measured, if no run has to be repeated."""
    steps = (each.predictions[name].seconds for each in variants for name in each.without_slow_alternatives().programs)
    return speed.dilation * (speed.repeats + SLOWER) * sum(steps)


def _similar(recorded: Sequence[RecordedVariant], conditions: Conditions) -> list[list[RecordedVariant]]:
    """Return groups of variants of one split that need similar dilations.

    Each group has a dilation of its own, so that a variant with few messages does not wait for one with many.
    """
    groups: list[list[RecordedVariant]] = []
    needed = {each.variant.name: _speed(each.cell, [each], conditions).dilation for each in recorded}
    for _, of_split in itertools.groupby(recorded, lambda each: each.variant.split):
        limit = 0.0
        for each in sorted(of_split, key=lambda each: needed[each.variant.name]):
            if needed[each.variant.name] > limit:
                groups.append([])
                limit = _LARGEST_RATIO * needed[each.variant.name]
            groups[-1].append(each)
    return groups


def _measured_rows(
    variants: Sequence[RecordedVariant], counts: dict[str, int], speed: Speed, conditions: Conditions
) -> list[dict[str, Any]]:
    """Return the rows of the variants of a split, which are measured together."""
    recordings = {each.variant.name: each.without_slow_alternatives() for each in variants}
    measured = measure_split(variants[0].cell, RecordedSplit(recordings, counts), speed)
    return [
        {
            **cell_rows.measured_row(each, measured.variants[each.variant.name], measured, conditions.quality),
            "dilation": speed.dilation,
            "thinning": speed.thinning,
        }
        for each in variants
    ]


def run_all(
    cells: Sequence[RequestedCell],
    conditions: Conditions,
    progress: ProgressReporter,
    earlier: Sequence[dict[str, Any]] = (),
    keep: Callable[[list[dict[str, Any]]], None] = lambda finished: None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return all cells of the record, and why some are missing.

    Args:
        cells: the cells and their variants.
        conditions: how to measure them.
        progress: gets activities and work items.
        earlier: cells of an earlier record; those that are asked for again are not measured again. A cell that lacks
            variants or repeats, or that was recorded with another number of blocks, is measured again with all its
            variants, so that they are compared in the same run.
        keep: called with all finished cells after each one.
    """
    kept = {_key(cell): cell for cell in earlier}
    missing = []
    for each in cells:
        cell = kept.get(_key(_describe(each, conditions)))
        if cell is None:
            missing.append(each)
        elif _is_finished(cell, each, conditions.repeats):
            set_psnr(cell, conditions.quality)
        else:
            missing.append(add_modes(each, cell["modes"]))
    progress.set_total(conditions.items * sum(len(each.variants) for each in missing))
    failures = []
    for each in missing:
        key = _key(_describe(each, conditions))
        try:
            cell = run(each, conditions, progress)
        except RuntimeError as error:
            failures.append(f"{_title(each.cell)}: {error}")
            continue
        _keep_psnr(cell, kept.get(key))
        kept[key] = cell
        keep(list(kept.values()))
    return list(kept.values()), failures


def read_cells(file: Path | None) -> list[dict[str, Any]]:
    """Return the cells of a record; none if there is no such file.

    Raises:
        ValueError: the file is no record of this benchmark.
    """
    if file is None or not file.exists():
        return []
    try:
        cells: list[dict[str, Any]] = record_file.read(file)["cells"]
        for cell in cells:
            _ = _key(cell), cell["blocks"], cell["modes"], cell["rows"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--json {file} is not valid ({error}); it must be a new file, or a record of `cocodiff bench cluster`"
        ) from None
    return cells


def _describe(requested: RequestedCell, conditions: Conditions) -> dict[str, Any]:
    cell = requested.cell
    return {
        "machine": cell.machine.name,
        "nodes": cell.nodes,
        "ranks": cell.topology.size,
        "topology": str(cell.topology),
        "model": cell.model,
        "resolution": cell.resolution,
        "batch": cell.batch,
        "text_tokens": cell.workload.text_tokens,
        "blocks": cell.blocks,
        "launch_us": 1e6 * cell.machine.accelerator.launch_seconds,
        "requested_dilation": conditions.dilation,
        "predicted": conditions.predicts,
        "modes": list(requested.modes),
        "slow_axes": list(cell.profile.slow_axes),
    }


def _variants_in_splits(requested: RequestedCell) -> dict[str, list[str]]:
    """Return the variants that run stock, or a mode, in any split, by the name that stands for the fastest of them."""
    named = {name: mode for name, mode in BEST_MODES.items() if name in requested.modes}
    in_splits = {name: [each.name for each in requested.variants if each.mode == mode] for name, mode in named.items()}
    if BEST_STOCK in requested.modes:
        in_splits[BEST_STOCK] = [each.name for each in requested.variants if each.is_stock]
    return in_splits


def _key(cell: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(str(cell[name]) for name in _KEY)


def _is_finished(cell: dict[str, Any], requested: RequestedCell, repeats: int) -> bool:
    """Return whether an earlier cell has all variants of a requested one, of as many blocks, and so many repeats."""
    has_repeats = all(len(row["step_seconds"]) >= repeats for row in cell["rows"] if row["step_seconds"])
    return has_repeats and set(requested.modes) <= set(cell["modes"]) and cell["blocks"] == requested.cell.blocks


def set_psnr(cell: dict[str, Any], quality: QualityRecord) -> None:
    """Set the PSNR of the lossy rows of an earlier cell that the quality record has.

    Rows of older records do not name their exchange: their PSNR may be that of another one, so it is not kept.
    """
    if not quality.rows:
        return
    for row in cell["rows"]:
        if row["lossless"]:
            continue
        psnr_db, exchanges = quality.psnr_db(cell, row), list(coded_exchanges(cell, row))
        if psnr_db is not None or row.get("coded_exchanges", []) != exchanges:
            row["psnr_db"] = psnr_db
        row["coded_exchanges"] = exchanges


def _keep_psnr(cell: dict[str, Any], earlier: dict[str, Any] | None) -> None:
    """Set the PSNR that only an earlier measurement of a cell has, of the same exchange."""
    known = {_psnr_key(row): row["psnr_db"] for row in earlier["rows"]} if earlier else {}
    for row in cell["rows"]:
        if not row["lossless"] and row["psnr_db"] is None:
            row["psnr_db"] = known.get(_psnr_key(row))


def _psnr_key(row: dict[str, Any]) -> tuple[str, ...]:
    return row["variant"], *row.get("coded_exchanges", ())


def _speed(cell: Cell, recorded: Sequence[RecordedVariant], conditions: Conditions) -> Speed:
    programs = [program for each in recorded for program in each.recording.programs.values()]
    seconds = [outcome.seconds for each in recorded for outcome in each.predictions.values()]
    return choose_speed(cell, programs, seconds, conditions.repeats, conditions.dilation)


def variants_by_split(variants: Sequence[Variant]) -> dict[UlyssesRingSplit, list[Variant]]:
    splits: dict[UlyssesRingSplit, list[Variant]] = {}
    for each in variants:
        splits.setdefault(each.split, []).append(each)
    return splits


def _advance(progress: ProgressReporter, items: int) -> None:
    for _ in range(items):
        progress.advance()


def _title(cell: Cell) -> str:
    return f"{cell.machine.name}, {cell.nodes} nodes, {cell.model}, {cell.resolution} px"
