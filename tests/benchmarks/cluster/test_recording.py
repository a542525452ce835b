"""Recorded steps of stock and the plugin: bytes and seconds of the simulator."""

import pytest

from benchmarks.cluster.cell import Cell
from benchmarks.cluster.recording import record_split
from benchmarks.cluster.rows import RecordedVariant
from benchmarks.cluster.variants import OPTIONS, Variant
from xfuser_cocodiff.tools.simulation.machines import MACHINES
from xfuser_cocodiff.tools.simulation.step_time import estimate_step
from xfuser_cocodiff.xdit.settings.ring_placement import UlyssesRingSplit


def recorded(cell: Cell, mode: str, ulysses: int, ring: int = 1) -> RecordedVariant:
    """Return a mode that the recorder runs, the plugin itself on an emulated accelerator."""
    variant = Variant(mode, UlyssesRingSplit(ulysses, ring), options=OPTIONS[mode])
    return RecordedVariant(cell, variant, record_split(cell, variant.split, [variant])[mode])


def test_stock_and_rules_are_recorded_in_a_process_of_their_own() -> None:
    cell, split = Cell(MACHINES["aurora"], 1, "flux.1-dev", 768), UlyssesRingSplit(12, 1)
    variants = [Variant(name, split, name) for name in ("stock", "stock-combined", "stock-separate", "fp4")]
    recordings = record_split(cell, split, variants)
    rows = {each.name: RecordedVariant(cell, each, recordings[each.name]).row() for each in variants}
    sent = {name: sum(row["bytes_per_link"].values()) for name, row in rows.items()}
    assert sent == {
        **dict.fromkeys(sent, sent["stock"]),
        "fp4": pytest.approx(sent["stock"] * 9 / 32, rel=1e-3),
    }  # but for the last all-gather
    assert rows["stock"] | {"mode": "", "variant": ""} == rows["stock-combined"] | {"mode": "", "variant": ""}
    kernels, messages = (
        {name: len(getattr(each.programs["step"], counted)) for name, each in recordings.items()}
        for counted in ("kernels", "collectives")
    )
    assert messages["stock"] == messages["fp4"] < messages["stock-separate"]
    assert kernels["stock"] < kernels["stock-separate"]
    assert rows["stock"]["lossless"] and not rows["fp4"]["lossless"]


def test_a_coded_ring_sends_an_eighth_of_k_and_v() -> None:
    cell, split = Cell(MACHINES["ethernet-100"], 2, "flux.1-dev", 768), UlyssesRingSplit(8, 2)
    variants = [Variant(name, split, name) for name in ("stock", "compact")]
    recordings = record_split(cell, split, variants)
    rows = [RecordedVariant(cell, each, recordings[each.name]).row() for each in variants]
    stock, coded = (row["bytes_per_link"] for row in rows)
    assert coded == {"gpu": stock["gpu"], "node": pytest.approx(stock["node"] / 8, rel=0.02)}
    assert [row["lossless"] for row in rows] == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "gathered"), [("balanced", ("node",)), ("paper", ())])
def test_recorded_traffic_of_the_plugin_is_that_of_the_simulator(mode: str, gathered: tuple[str, ...]) -> None:
    known = recorded(Cell(MACHINES["ethernet-25"], 2, "flux.2-dev", 1024), mode, 16)
    row, estimate = known.row(), estimate_step(known.cell.scenario, known.variant.split, mode)
    assert estimate.gathered == gathered
    assert row["bytes_per_link"] == {axis: pytest.approx(size, rel=0.01) for axis, size in estimate.sent_bytes.items()}
    assert known.step_seconds == pytest.approx(estimate.step_seconds, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("ulysses", "ring", "tolerance"), [(2, 6, 0.03), (12, 1, 0.015)])
def test_simulator_knows_merges_of_rings_and_zero_padding(ulysses: int, ring: int, tolerance: float) -> None:
    """SD3.5's 38 heads fit 2 ranks and are zero-padded for 12. Both take 3 to 8 % of a short step."""
    known = recorded(Cell(MACHINES["aurora"], 1, "sd3.5-large", 768), "exact", ulysses, ring)
    estimate = estimate_step(known.cell.scenario, known.variant.split, "exact")
    assert known.step_seconds == pytest.approx(estimate.step_seconds, rel=tolerance)
