"""PSNR of variants in a record of `cocodiff quality`."""

import json
from pathlib import Path

import pytest

from xfuser_cocodiff.engine.settings.ring_placement import UlyssesRingSplit
from xfuser_cocodiff.lab.cluster_bench.quality_record import QualityRecord
from xfuser_cocodiff.lab.cluster_bench.rules import RULES
from xfuser_cocodiff.lab.cluster_bench.variants import Variant
from xfuser_cocodiff.lab.comparison import quality

SPLIT = UlyssesRingSplit(8, 1)


def test_every_case_of_the_sweep_is_found_by_its_rule_or_mode(tmp_path: Path) -> None:
    """Rows as `cocodiff quality --sweep --mode balanced,fast,balanced@bits=1;bits_o=1` writes them."""
    cases = quality.parse_cases(["balanced", "fast", "balanced@bits=1;bits_o=1"], sweep=True)
    rows = [
        {"mode": each.mode, "sweep": each.sweep, "series": each.series, "codec": each.changes, "psnr_db_mean": number}
        for number, each in enumerate(cases)
    ]
    file = tmp_path / "quality.json"
    file.write_text(json.dumps({"rows": rows}))
    record = QualityRecord.read(file)
    lossy = [rule for rule in RULES.values() if not rule.is_lossless]
    found = {rule.name: record.psnr_db(Variant(rule.name, SPLIT, rule)) for rule in lossy}
    assert len({*found.values()}) == len(lossy) >= 5 and None not in found.values()
    assert {name: rows[int(number or 0)]["series"] for name, number in found.items()} == {
        rule.name: rule.quality_case.series for rule in lossy if rule.quality_case
    }
    modes = ("balanced", "fast@v_first=off", "balanced@schedule=bits=1;bits_o=1", "balanced@schedule=bits=3", "paper")
    assert [record.psnr_db(Variant(mode, SPLIT, mode=mode)) for mode in modes] == [0, 1, 2, None, None]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{"share": 1}]}'])
def test_other_files_are_errors(text: str, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"--quality .*other.json is not valid"):
        QualityRecord.read(file)
