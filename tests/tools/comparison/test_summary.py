"""Summary of a comparison: bytes between nodes, table rows and the sentence."""

import pytest

from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.tools.comparison import summary


def run(name: str, *seconds: float, **more: object) -> dict:
    """Return a run of a compare record with the fields that the summary reads."""
    ordered = sorted(seconds)
    spread = {"median": ordered[len(ordered) // 2], "min": ordered[0], "max": ordered[-1]}
    defaults = {
        **{"name": name, "degree": 4, "topology": None if name == "stock" else "node=2,gpu=2"},
        **{"bytes": {"flat": 3000}, "step_seconds": list(seconds), "step_seconds_spread": spread},
        **{"ratio_to_stock": 1.0, "latents": {"bit_equal": True}, "image": {"psnr_db": None, "path": "p.png"}},
        "mean_error": None,
    }
    return {**defaults, **more}


@pytest.mark.parametrize(
    ("stage", "axes"),
    [("flat", "node gpu tile"), ("tile", "tile"), ("gpu+node", "node gpu"), ("tile+gpu", "gpu tile"), ("node", "node")],
)
def test_inter_node_fraction_equals_a_count_over_ranks(stage: str, axes: str) -> None:
    """The count is over the peers of rank 0: ranks whose coordinates differ only on the axes of the stage."""
    topology = Topology.parse("3x2x4")
    names = [axis.name for axis in topology.axes]
    origin = topology.coordinates(0)
    others = [topology.coordinates(rank) for rank in range(1, topology.size)]
    peers = [
        other
        for other in others
        if {name for name, a, b in zip(names, origin, other, strict=True) if a != b} <= set(axes.split())
    ]
    on_other_nodes = [peer for peer in peers if peer[0] != origin[0]]
    assert summary.inter_node_fraction(stage, topology) == pytest.approx(len(on_other_nodes) / len(peers))


def test_rows_and_sentence_show_speedup_and_quality() -> None:
    stock = run("stock", 0.9, 1.0, 1.1)
    exact = run("exact", 0.6, 0.7, 0.8, ratio_to_stock=0.7, bytes={"gpu": 500, "node": 2000})
    lossy = {"latents": {"bit_equal": False}, "image": {"psnr_db": 43.21, "path": "q.png"}, "codecs": {}}
    fast = run("fast", 0.25, ratio_to_stock=0.25, bytes={"node": 120, "gpu": 500}, **lossy)
    paper = run("paper", 0.85, 0.89, 0.95, ratio_to_stock=0.89, **lossy)
    slow = run("slow", 1.2, 1.25, 1.3, ratio_to_stock=1.25, latents={"bit_equal": False}, codecs=None)
    record = {"runs": [stock, exact, fast, paper, slow]}
    assert [tuple(row.values()) for row in summary.table_rows(record)] == [
        ("stock", "1.00 s (0.90 to 1.10)", "-", "2.00 kB", "-", "-"),
        ("exact", "700 ms (600 to 800)", "1.43x", "2.00 kB", "equal", "bit-identical"),
        ("fast", "250 ms", "4.00x (one repeat)", "120 B", "43.2 dB", "lossy"),
        ("paper", "890 ms (850 to 950)", "no significant difference", "2.00 kB", "43.2 dB", "lossy"),
        ("slow", "1.25 s (1.20 to 1.30)", "0.80x (slower)", "2.00 kB", "-", "differs"),
    ]
    assert summary.sentence(record) == (
        "exact: speedup 1.43x, bit-identical; fast: speedup 4.00x (one repeat), PSNR 43.2 dB to stock; paper: no "
        "significant difference in step time, PSNR 43.2 dB to stock; slow: speedup 0.80x (slower), differs."
    )


@pytest.mark.parametrize("topology", ["gpu=4", "node=1,gpu=4", None])
def test_bytes_cover_all_links_without_nodes(topology: str | None) -> None:
    rows = summary.table_rows({"runs": [run("stock", 1.0), run("exact", 1.0, topology=topology, bytes={"gpu": 3000})]})
    assert [row["sent"] for row in rows] == ["3.00 kB"] * 2


def test_unknown_bytes_are_a_dash() -> None:
    rows = summary.table_rows({"runs": [run(name, 1.0, bytes=None) for name in ("stock", "exact")]})
    assert [row["sent between nodes"] for row in rows] == ["-"] * 2


def test_lines_name_the_exchange_of_each_axis_and_its_bytes() -> None:
    fast = run("fast", 1.0, exchange={"node": "kv", "gpu": "heads"}, bytes={"node": 1200, "gpu": 34_000})
    compiled = run("exact", 1.0, exchange={"node": "heads"}, bytes=None)
    assert summary.exchange_lines({"runs": [run("stock", 1.0, exchange={}), fast, compiled]}) == [
        "Exchange of fast: node kv, gpu heads; sent: node 1.20 kB, gpu 34.00 kB",
        "Exchange of exact: node heads; sent: -",
    ]


def test_lossy_runs_show_their_error_beside_that_of_other_codes() -> None:
    errors = {"mean_error": 0.0221, "error": {"k": 0.0209, "v": 0.0233}, "bits": 3.42}
    balanced = run("balanced", 1.0, **errors, yardsticks={"fp8": 0.0262, "fp4": 0.095})
    fast = run("fast", 1.0, **{**errors, "error": {"v": 0.0221}}, yardsticks={})
    assert summary.error_lines({"runs": [run("stock", 1.0), run("exact", 1.0), balanced, fast]}) == [
        "balanced: error 2.2 % (K 2.1 %, V 2.3 %) at 3.4 bits per value; on the same tensors FP8 2.6 %, FP4 9.5 %",
        "fast: error 2.2 % (V 2.2 %) at 3.4 bits per value",
    ]


def test_table_is_aligned() -> None:
    stock, exact = run("stock", 0.0123, 0.0124, 0.0125), run("exact", 0.01, ratio_to_stock=0.8)
    assert summary.format_table({"runs": [stock, exact]}).splitlines() == [
        "                     step time              speedup   sent between nodes   PSNR to stock   result",
        "stock   12.4 ms (12.3 to 12.5)                    -              2.00 kB               -   -",
        "exact                  10.0 ms   1.25x (one repeat)              2.00 kB           equal   bit-identical",
    ]
