"""PSNR of variants, from a record of `cocodiff quality`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xfuser_cocodiff.lab.cluster_bench.variants import Variant
from xfuser_cocodiff.lab.comparison.quality import CodecCase


@dataclass(frozen=True)
class QualityRecord:
    """Rows of a record of `cocodiff quality`; none without a record."""

    rows: tuple[dict[str, Any], ...] = ()

    @classmethod
    def read(cls, file: Path) -> "QualityRecord":
        """Return the record in a file.

        Raises:
            ValueError: the file cannot be read, or is no record of `cocodiff quality`.
        """
        try:
            rows = tuple(json.loads(file.read_text())["rows"])
            if not all({"mode", "sweep", "psnr_db_mean"} <= row.keys() for row in rows):
                raise KeyError("rows")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"--quality {file} is not valid ({error}); it must be a file that `cocodiff quality --sweep --json` "
                "wrote"
            ) from None
        return cls(rows)

    def psnr_db(self, variant: Variant) -> float | None:
        """Return the mean PSNR of a variant to lossless pictures; None if it was not measured."""
        if variant.rule is not None:
            return self._of_case(variant.rule.quality_case) if variant.rule.quality_case else None
        name, *options = variant.mode.split("@")
        schedules = [each.partition("=")[2] for each in options if each.startswith("schedule=")]
        mode = name.partition("/")[0]
        if schedules:
            schedule = schedules[-1].replace(";", ",")
            return self._of_case(CodecCase(mode, schedule, sweep=True, series=f"{mode}, changed"))
        rows = [row for row in self.rows if row["mode"] == mode and not row["sweep"]]
        return rows[0]["psnr_db_mean"] if rows else None

    def _of_case(self, case: CodecCase) -> float | None:
        """Return the PSNR of the row of a case."""
        for row in self.rows:
            if row["sweep"] and (row["mode"], row.get("series"), row.get("codec")) == (
                *(case.mode, case.series, case.changes),
            ):
                psnr: float | None = row["psnr_db_mean"]
                return psnr
        return None
