"""PSNR of variants in a record of `cocodiff quality`: of modes by their exchange."""

import json
from pathlib import Path
from typing import Any

import pytest

from xfuser_cocodiff.engine.topology.plans import HEADS, KV
from xfuser_cocodiff.lab.cluster_bench.quality_record import QualityRecord
from xfuser_cocodiff.lab.cluster_bench.rules import RULES
from xfuser_cocodiff.lab.comparison import quality
from xfuser_cocodiff.lab.launching.single_rank import RING

TWO_NODES = {"topology": "node=2,gpu=8", "slow_axes": ["node"]}


def variant(name: str, ulysses: int = 16, ring: int = 1) -> dict[str, Any]:
    """Return the fields of a row by which its PSNR is found."""
    return {"variant": name, "split": {"ulysses": ulysses, "ring": ring}}


def rows_of_sweep() -> list[dict[str, Any]]:
    """Return rows as `cocodiff quality --sweep --mode balanced,fast,paper,balanced@bits=1;predictor=0` writes them for
    2x2 virtual ranks, each with its number as PSNR."""
    cases = quality.parse_cases(["balanced", "fast", "paper", "balanced@bits=1;predictor=0"], [*quality.SWEEP])
    rings = (quality.COMPACTFUSION, quality.MODES_IN_RING)
    return [
        {
            **{"mode": each.mode, "sweep": each.sweep, "series": each.series, "codec": each.changes},
            "exchanges": [RING if each.series in rings else HEADS if is_by_heads(each) else KV],
            "psnr_db_mean": float(number),
        }
        for number, each in enumerate(cases)
    ]


def is_by_heads(case: quality.CodecCase) -> bool:
    return case.series in quality.BASELINES or case.mode == "paper"


def test_every_case_of_the_sweep_is_found_by_its_rule(tmp_path: Path) -> None:
    rows = rows_of_sweep()
    file = tmp_path / "quality.json"
    file.write_text(json.dumps({"rows": rows}))
    record = QualityRecord.read(file)
    lossy = [rule for rule in RULES.values() if not rule.is_lossless]
    found = {rule.name: record.psnr_db(TWO_NODES, variant(rule.name)) for rule in lossy}
    assert len({*found.values()}) == len(lossy) >= 5 and None not in found.values()
    assert {name: rows[int(number or 0)]["series"] for name, number in found.items()} == {
        rule.name: rule.quality_case.series for rule in lossy if rule.quality_case
    }


def test_modes_are_found_by_their_exchange() -> None:
    rows = rows_of_sweep()
    record = QualityRecord(tuple(rows))

    def found(each: dict[str, Any], cell: dict[str, Any] = TWO_NODES) -> tuple[str, str] | None:
        number = record.psnr_db(cell, each)
        return None if number is None else (rows[int(number)]["series"], rows[int(number)]["exchanges"][0])

    aurora = {"topology": "node=2,gpu=6,tile=2", "slow_axes": ["node", "gpu"]}
    pcie = {"topology": "gpu=8", "slow_axes": []}
    assert found(variant("balanced")) == ("balanced", KV)
    assert found(variant("fast 16x1")) == ("fast", KV)
    assert found(variant("fast@v_first=off", 8, 2)) == (quality.MODES_IN_RING, RING)
    assert found(variant("balanced", 24), aurora) == (quality.MODES_BY_HEADS, HEADS)  # K and V of twelve coordinates
    assert found(variant("balanced 12x2", 12, 2), aurora) is None  # by heads, and in a ring
    assert found(variant("balanced 2x12", 2, 12), aurora) == (quality.MODES_IN_RING, RING)
    assert found(variant("paper")) == ("paper", HEADS)
    assert found(variant("balanced@slow_axes=gpu", 8), pcie) == (quality.MODES_BY_HEADS, HEADS)
    assert found(variant("balanced/hierarchical:gpu;node")) == (quality.MODES_BY_HEADS, HEADS)
    assert found(variant("balanced@schedule=bits=1;predictor=0")) == ("balanced, changed", KV)
    assert found(variant("balanced@schedule=bits=1;predictor=0", 8, 2)) is None
    assert found(variant("balanced@schedule=bits=3")) is None


def test_rows_that_do_not_name_their_exchange_were_by_heads() -> None:
    row = {"mode": "balanced", "sweep": False, "series": "balanced", "codec": "", "psnr_db_mean": 41.0}
    record = QualityRecord((row,))
    assert record.psnr_db(TWO_NODES, variant("balanced")) is None
    assert record.psnr_db({**TWO_NODES, "slow_axes": ["node", "gpu"]}, variant("balanced")) == 41.0


def test_several_records_are_one(tmp_path: Path) -> None:
    files = []
    for number, exchange in enumerate((KV, RING, KV)):
        row = {"mode": "fast", "sweep": False, "exchanges": [exchange], "psnr_db_mean": float(number)}
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps({"rows": [row]}))
    record = QualityRecord.read_all(files)
    assert record.psnr_db(TWO_NODES, variant("fast")) == 0.0
    assert record.psnr_db(TWO_NODES, variant("fast", 8, 2)) == 1.0
    assert QualityRecord.read_all([]) == QualityRecord()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{"share": 1}]}'])
def test_other_files_are_errors(text: str, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"--quality .*other.json is not valid"):
        QualityRecord.read(file)
