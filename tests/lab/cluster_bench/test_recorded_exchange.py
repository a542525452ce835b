"""Recorded steps of the plugin against the simulator, in both exchanges across nodes."""

import pytest

from xfuser_cocodiff.lab.cluster_bench import cell_rows
from xfuser_cocodiff.lab.cluster_bench.cell import Cell
from xfuser_cocodiff.lab.cluster_bench.quality_record import QualityRecord
from xfuser_cocodiff.lab.cluster_bench.recording import record_split
from xfuser_cocodiff.lab.cluster_bench.variants import Variant
from xfuser_cocodiff.lab.launching import transformer_wrappers
from xfuser_cocodiff.lab.simulation.machines import MACHINES
from xfuser_cocodiff.lab.simulation.step_time import estimate_step
from xfuser_cocodiff.xdit.settings.ring_placement import UlyssesRingSplit


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "name"), [("balanced", "kv"), ("paper", "heads")])
def test_recorded_traffic_of_the_plugin_is_that_of_the_simulator(mode: str, name: str) -> None:
    """The recorder runs the plugin itself, on an emulated accelerator."""
    cell = Cell(MACHINES["ethernet-25"], 2, "flux.2-dev", 1024)
    variant = Variant(mode, UlyssesRingSplit(16, 1), mode=mode)
    transformer_wrappers.preload(cell.model)
    recorded = record_split(cell, variant.split, [variant])
    (known,) = cell_rows.recorded_variants(cell, recorded, [variant])
    row, estimate = cell_rows.predicted_row(known, QualityRecord()), estimate_step(cell.scenario, variant.split, mode)
    assert estimate.exchange == {"node": name, "gpu": "heads"}
    assert row["coded_exchanges"] == [name]
    assert row["bytes_per_link"] == {axis: pytest.approx(size, rel=0.01) for axis, size in estimate.sent_bytes.items()}
    assert row["predicted_seconds"] == pytest.approx(estimate.step_seconds, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("ulysses", "ring", "tolerance"), [(2, 6, 0.03), (12, 1, 0.015)])
def test_simulator_knows_merges_of_rings_and_zero_padding(ulysses: int, ring: int, tolerance: float) -> None:
    """SD3.5's 38 heads fit 2 ranks and are zero-padded for 12. Both take 3 to 8 % of a short step."""
    cell = Cell(MACHINES["aurora"], 1, "sd3.5-large", 768)
    variant = Variant("exact", UlyssesRingSplit(ulysses, ring), mode="exact")
    transformer_wrappers.preload(cell.model)
    (known,) = cell_rows.recorded_variants(cell, record_split(cell, variant.split, [variant]), [variant])
    row = cell_rows.predicted_row(known, QualityRecord())
    estimate = estimate_step(cell.scenario, variant.split, variant.mode)
    assert row["predicted_seconds"] == pytest.approx(estimate.step_seconds, rel=tolerance)
