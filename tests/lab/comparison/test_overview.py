"""A comparison at one glance: arithmetic of what travels between nodes, and the words of rows and sentences."""

import pytest

from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.lab.comparison import overview


def run(name: str, *seconds: float, **more: object) -> dict:
    """A side of a record, as far as rows go by it."""
    ordered = sorted(seconds)
    spread = {"median": ordered[len(ordered) // 2], "min": ordered[0], "max": ordered[-1]}
    usual = {
        **{"name": name, "degree": 4, "topology": None if name == "stock" else "node=2,gpu=2"},
        **{"bytes": {"flat": 3000}, "step_seconds": list(seconds), "step_seconds_spread": spread},
        **{"ratio_to_stock": 1.0, "latents": {"bit_equal": True}, "image": {"psnr_db": None, "path": "p.png"}},
    }
    return {**usual, **more}


@pytest.mark.parametrize(
    ("stage", "axes"),
    [("flat", "node gpu tile"), ("tile", "tile"), ("gpu+node", "node gpu"), ("tile+gpu", "gpu tile"), ("node", "node")],
)
def test_what_goes_to_other_nodes(stage: str, axes: str) -> None:
    """Counted rank by rank: those that differ on the axes of a stage only, and those of them on another node."""
    topology = Topology.parse("3x2x4")
    names = [axis.name for axis in topology.axes]
    here = topology.coordinates(0)
    places = [topology.coordinates(rank) for rank in range(1, topology.size)]
    met = [
        there
        for there in places
        if {name for name, a, b in zip(names, here, there, strict=True) if a != b} <= set(axes.split())
    ]
    away = [there for there in met if there[0] != here[0]]
    assert overview.between_nodes(stage, topology) == pytest.approx(len(away) / len(met))


def test_rows_say_what_a_side_came_to() -> None:
    stock = run("stock", 0.9, 1.0, 1.1)
    exact = run("exact", 0.6, 0.7, 0.8, ratio_to_stock=0.7, bytes={"gpu": 500, "node": 2000})
    far = {"latents": {"bit_equal": False}, "image": {"psnr_db": 43.21, "path": "q.png"}, "codecs": {}}
    fast = run("fast", 0.25, ratio_to_stock=0.25, bytes={"node": 120, "gpu": 500}, **far)
    chance = run("paper", 0.85, 0.89, 0.95, ratio_to_stock=0.89, **far)
    slow = run("slow", 1.2, 1.25, 1.3, ratio_to_stock=1.25, latents={"bit_equal": False}, codecs=None)
    record = {"runs": [stock, exact, fast, chance, slow]}
    assert [tuple(row.values()) for row in overview.rows(record)] == [
        ("stock", "1.00 s (0.90 to 1.10)", "-", "2.00 kB", "-", "-"),
        ("exact", "700 ms (600 to 800)", "1.43x", "2.00 kB", "equal", "bit-identical"),
        ("fast", "250 ms", "4.00x (one repeat)", "120 B", "43.2 dB", "approximated"),
        ("paper", "890 ms (850 to 950)", "no significant difference", "2.00 kB", "43.2 dB", "approximated"),
        ("slow", "1.25 s (1.20 to 1.30)", "0.80x (slower)", "2.00 kB", "-", "differs"),
    ]
    assert overview.sentence(record) == (
        "exact speedup 1.43x, bit-identical; fast speedup 4.00x (one repeat), PSNR 43.2 dB to stock; paper no "
        "significant difference in speed, PSNR 43.2 dB to stock; slow speedup 0.80x (slower), differs."
    )


@pytest.mark.parametrize("topology", ["gpu=4", "node=1,gpu=4", None])
def test_bytes_are_of_all_links_where_no_nodes_are_known(topology: str | None) -> None:
    rows = overview.rows({"runs": [run("stock", 1.0), run("exact", 1.0, topology=topology, bytes={"gpu": 3000})]})
    assert [row["sent"] for row in rows] == ["3.00 kB"] * 2


def test_bytes_that_nobody_saw() -> None:
    rows = overview.rows({"runs": [run(name, 1.0, bytes=None) for name in ("stock", "exact")]})
    assert [row["sent between nodes"] for row in rows] == ["-"] * 2


def test_a_table_is_aligned() -> None:
    stock, exact = run("stock", 0.0123, 0.0124, 0.0125), run("exact", 0.01, ratio_to_stock=0.8)
    assert overview.table({"runs": [stock, exact]}).splitlines() == [
        "                     step time              speedup   sent between nodes   PSNR to stock   result",
        "stock   12.4 ms (12.3 to 12.5)                    -              2.00 kB               -   -",
        "exact                  10.0 ms   1.25x (one repeat)              2.00 kB           equal   bit-identical",
    ]
