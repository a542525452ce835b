"""The simulator against steps that were measured on an emulated cluster, and against what must hold of any."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from xfuser_cocodiff import cli
from xfuser_cocodiff.simulation import emulated

MEASURED = Path(__file__).with_name("bench_model.json")
"""Of `cocodiff bench all --only speed`, as docs/scale.md has it, but for the paper's mode, whose steps are each of
other bytes: 8 ranks on the 2 cores of an AMD EPYC."""
AT_HIGH_RESOLUTION = MEASURED.with_stem("bench_model_at_high_resolution")
"""The same of `--only resolution`."""


def record() -> dict[str, Any]:
    return json.loads(MEASURED.read_text())


def test_steps_are_as_they_were_measured() -> None:
    records = [json.loads(file.read_text()) for file in (MEASURED, AT_HIGH_RESOLUTION)]
    cells = [cell for each in records for cell in emulated.held_against(each)]
    assert {cell.mode for cell in cells} == {"stock", "exact", "balanced", "fast"} and len(cells) == (4 + 2) * 4
    off = [(cell.mode, round(cell.share, 2), round(cell.ratio, 2)) for cell in cells if not cell.agrees]
    assert not off


def simulated(change: dict[str, Any], of: str = "exact") -> float:
    """Seconds of a mode at one share, where something of its row is another."""
    changed = record()
    changed["rows"] = [row | change for row in changed["rows"] if row["mode"] == of][:1]
    return emulated.held_against(changed)[0].simulated


def ring(scale: float) -> float:
    """Seconds in which gloo brings the output together: seven ranks' blocks go over the slowest link."""
    return 7 * (1024 / 8 * 64 * 4) / (min(record()["rates"].values()) * scale * 1e6 / 8)


@pytest.mark.parametrize("mode", ["stock", "exact", "balanced"])
def test_faster_links_and_fewer_bytes_make_no_step_longer(mode: str) -> None:
    [row] = [row for row in record()["rows"] if row["mode"] == mode][:1]

    def at(scale: float) -> float:
        """With the same computation: what is gathered takes longer on slower links too."""
        alone = row["alone_seconds"] + ring(scale) - ring(row["scale"])
        return simulated({"scale": scale, "alone_seconds": alone}, mode)

    times = [at(row["scale"] * factor) for factor in (0.1, 0.5, 1, 2, 4)]
    assert times == sorted(times, reverse=True) and times[0] > 1.2 * times[-1]
    shares = [simulated({"bytes_slow_fraction": share}, "balanced") for share in (0.01, 0.1, 0.5)]
    assert shares == sorted(shares)


def test_without_bytes_a_coded_step_is_what_ranks_compute() -> None:
    [row] = [row for row in record()["rows"] if row["mode"] == "balanced"][:1]
    little = {"bytes_slow_fraction": 1e-9, "schedules": {}}
    calls = emulated.CALL_SECONDS * record()["shape"]["depth"] * 2 * 8 / 2  # two a layer, eight ranks on two cores
    found = simulated({**little, "scale": 1e9}, "balanced")
    assert found == pytest.approx(row["alone_seconds"] + calls, rel=1e-6)


def test_what_stock_gathers_is_no_computation() -> None:
    [row] = [row for row in record()["rows"] if row["mode"] == "stock"][:1]
    little = {"bytes_slow_fraction": 1e-9, "schedules": {}}
    of_stock, ours, whole = simulated(little, "stock"), simulated(little, "balanced"), ring(row["scale"])
    # It was taken off what was measured without all-to-alls, and is put back.
    assert of_stock == pytest.approx(simulated({**little, "scale": 1e9}, "stock"), rel=1e-6)
    assert of_stock - whole < ours < of_stock - 0.3 * whole, "the plugin gathers along the topology"


def test_a_port_carries_all_that_a_rank_sends() -> None:
    changed = record() | {"topology": "flat", "ranks": 8, "rates": {"flat": 16.0}}
    changed["rows"] = [row | {"scale": 1.0} for row in changed["rows"] if row["mode"] == "stock"][:1]
    [cell], [row] = emulated.held_against(changed), changed["rows"]
    sent = 6 * 4 * 7 / 8 * (1088 / 8 * 512 * 4)  # of Q, K, V and O of six layers, what seven of eight ranks get
    moving = 1.55 * sent / (16e6 / 8)
    assert moving < cell.simulated < moving + row["alone_seconds"]


def test_the_command_says_what_agrees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert cli.main(["simulate", "--bench", str(MEASURED), "--json", str(out)]) == 0
    assert capsys.readouterr().out.count("agrees") == 16
    assert {cell["agrees"] for cell in json.loads(out.read_text())["bench"]} == {True}


def test_other_records_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ring, other = copy.deepcopy(record()), tmp_path / "other.json"
    ring["rows"][0]["ring"] = 2
    for content, words in (
        (ring, "a ring"),
        ({"rows": [{}]}, "not a record of `cocodiff bench model`"),
        ([], "not a rec"),
    ):
        other.write_text(json.dumps(content))
        assert cli.main(["simulate", "--bench", str(other)]) == 2
        assert words in capsys.readouterr().err
    assert cli.main(["simulate", "--bench", str(tmp_path / "none.json")]) == 2
    assert "--bench" in capsys.readouterr().err
