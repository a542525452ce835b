"""PSNR of variants, from records of `cocodiff quality`: of modes by their exchange along slow axes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xfuser_cocodiff.engine.topology.plans import HEADS
from xfuser_cocodiff.lab.cluster_bench import coded_exchange
from xfuser_cocodiff.lab.cluster_bench.rules import RULES, Rule
from xfuser_cocodiff.lab.comparison.quality import MODES_IN, UNIFORM
from xfuser_cocodiff.lab.reporting import record_file


@dataclass(frozen=True)
class QualityRecord:
    """Rows of records of `cocodiff quality`; none without a record."""

    rows: tuple[dict[str, Any], ...] = ()

    @classmethod
    def read(cls, file: Path) -> "QualityRecord":
        """Return the record in a file.

        Raises:
            ValueError: the file cannot be read, or is no record of `cocodiff quality`.
        """
        try:
            rows = tuple(record_file.read(file)["rows"])
            if not all({"mode", "sweep", "psnr_db_mean"} <= row.keys() for row in rows):
                raise KeyError("rows")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"--quality {file} is not valid ({error}); it must be a file that `cocodiff quality --sweep --json` "
                "wrote"
            ) from None
        return cls(rows)

    @classmethod
    def read_all(cls, files: Sequence[Path]) -> "QualityRecord":
        """Return the rows of several files; see :meth:`read`. The first row of a case counts."""
        return cls(tuple(row for file in files for row in cls.read(file).rows))

    def psnr_db(self, cell: dict[str, Any], row: dict[str, Any]) -> float | None:
        """Return the mean PSNR of a variant to lossless pictures; None if it was not measured.

        Args:
            cell: `topology` and `slow_axes` of its cell.
            row: its `variant` and `split`, and its `coded_exchanges` if they are known.
        """
        name = row["variant"].partition(" ")[0]
        rule = RULES.get(name)
        if rule and not rule.plugin_variant:
            return self._of_rule(rule)
        exchanges = row.get("coded_exchanges")
        if exchanges is None:
            exchanges = coded_exchange.coded_exchanges(cell, row)
        return self._of_mode(name, tuple(exchanges))

    def _of_rule(self, rule: Rule) -> float | None:
        case = rule.quality_case
        wanted = case and (case.mode, case.series, case.changes)
        return next((row["psnr_db_mean"] for row in self.rows if row["sweep"] and _case_of(row) == wanted), None)

    def _of_mode(self, name: str, exchanges: tuple[str, ...]) -> float | None:
        """Return the PSNR of a mode, also with `schedule=`, by the exchanges that it encodes."""
        main, *options = name.split("@")
        mode = main.partition("/")[0]
        changes = ([each.partition("=")[2] for each in options if each.startswith("schedule=")] or [""])[-1]
        changed = changes.replace(";", ",")
        for row in self.rows:
            if row["mode"] != mode or tuple(row.get("exchanges", _BEFORE_GATHERS)) != exchanges:
                continue
            series, codec = row.get("series"), row.get("codec")
            is_mode = not row["sweep"] or series in MODES_IN
            if codec == changed and series in (f"{mode}, changed", UNIFORM) if changes else is_mode:
                psnr: float | None = row["psnr_db_mean"]
                return psnr
        return None


_BEFORE_GATHERS = (HEADS,)
"""Exchanges of rows that do not name them: older records, from before modes gathered K and V."""


def _case_of(row: dict[str, Any]) -> tuple[str, str | None, str | None]:
    return row["mode"], row.get("series"), row.get("codec")
