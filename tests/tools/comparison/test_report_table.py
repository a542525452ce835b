"""Summary of a comparison: bytes between nodes, table rows and the sentence."""

import pytest

from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.tools.comparison import report_table


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
    assert report_table.inter_node_fraction(stage, topology) == pytest.approx(len(on_other_nodes) / len(peers))


def test_rows_and_sentence_show_speedup_and_quality() -> None:
    stock = run("stock", 0.9, 1.0, 1.1)
    exact = run("exact", 0.6, 0.7, 0.8, ratio_to_stock=0.7, bytes={"gpu": 500, "node": 2000})
    lossy = {"latents": {"bit_equal": False}, "image": {"psnr_db": 43.21, "path": "q.png"}, "codecs": {}}
    fast = run("fast", 0.25, ratio_to_stock=0.25, bytes={"node": 120, "gpu": 500}, **lossy)
    paper = run("paper", 0.85, 0.89, 0.95, ratio_to_stock=0.89, **lossy)
    slow = run("slow", 1.2, 1.25, 1.3, ratio_to_stock=1.25, latents={"bit_equal": False}, codecs=None)
    record = {"runs": [stock, exact, fast, paper, slow]}
    assert [tuple(row.values()) for row in report_table.table_rows(record)] == [
        ("stock", "1.00 s (0.90 to 1.10)", "-", "2.00 kB", "-", "-"),
        ("exact", "700 ms (600 to 800)", "1.43x", "2.00 kB", "equal", "bit-identical"),
        ("fast", "250 ms", "4.00x (one repeat)", "120 B", "43.2 dB", "lossy"),
        ("paper", "890 ms (850 to 950)", "no significant difference", "2.00 kB", "43.2 dB", "lossy"),
        ("slow", "1.25 s (1.20 to 1.30)", "0.80x (slower)", "2.00 kB", "-", "differs"),
    ]
    assert report_table.sentence(record) == (
        "exact: speedup 1.43x, bit-identical; fast: speedup 4.00x (one repeat), PSNR 43.2 dB to stock; paper: no "
        "significant difference in step time, PSNR 43.2 dB to stock; slow: speedup 0.80x (slower), differs."
    )
