"""Names of rows for readers."""

import re

import pytest

from xfuser_cocodiff.lab.cluster_bench import requested_cells, row_names
from xfuser_cocodiff.lab.cluster_bench.rules import RULES
from xfuser_cocodiff.lab.cluster_bench.variants import BEST_MODES, BEST_STOCK
from xfuser_cocodiff.lab.simulation.workloads import WORKLOADS


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        ("stock", "stock, flat Ulysses"),
        ("best_stock", "best stock"),
        ("exact", "exact"),
        ("best_exact", "exact, fastest split"),
        ("paper", "V-Major (paper)"),
        ("fp4", "FP4 (LightX2V)"),
        ("exact@v_first=off@head_groups=1", "hierarchical all-to-all alone"),
        ("exact/flat@v_first=on@head_groups=4", "exact, plan flat, V-First, 4 head groups"),
        ("balanced@slow_axes=node;gpu", "balanced, slow node, gpu"),
        ("paper@slow_axes=gpu", "V-Major (paper), slow gpu"),
        ("balanced@schedule=bits=1;predictor=0", "balanced, bits=1, predictor=0"),
        ("balanced 24x1", "balanced, 24x1"),
        ("stock-combined 12x2", "stock, QKV in one message, 12x2"),
    ],
)
def test_names_say_what_a_row_is(mode: str, name: str) -> None:
    assert row_names.row_name(mode) == name


def test_all_known_rows_have_short_names_of_their_own() -> None:
    modes = [*RULES, *BEST_MODES, *BEST_MODES.values(), BEST_STOCK, row_names.TAPA, row_names.TAPA_AND_V_MAJOR]
    names = [row_names.row_name(mode) for mode in modes]
    assert len({*names}) == len(modes)
    assert not [name for name in names if re.search("[@_=]", name) or len(name) > 30]
    assert all(row_names.model_name(model) != model for model in WORKLOADS)


def test_pictures_show_modes_opponents_and_stock_only() -> None:
    rows = [*requested_cells.DEFAULT_MODES, "stock", "balanced@slow_axes=gpu", "balanced@schedule=bits=1"]
    assert all(map(row_names.is_frontier_row, rows))
    others = ["stock-combined 12x2", "balanced 24x1", row_names.TAPA, row_names.TAPA_AND_V_MAJOR, "exact/flat"]
    assert not any(map(row_names.is_frontier_row, others))
