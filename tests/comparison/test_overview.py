"""Comparisons at one glance: arithmetic of what travels between nodes, and the words of rows and sentences."""

import itertools
from pathlib import Path

import pytest

from xfuser_cocodiff.comparison import emulate, overview
from xfuser_cocodiff.comparison.overview import Setting
from xfuser_cocodiff.emulation.links import Cluster
from xfuser_cocodiff.machine.topology import Topology


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


def setting(*runs: dict, **more: object) -> Setting:
    return Setting({"runs": list(runs), **more}, Path("somewhere"))


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


def test_one_node_sends_nothing_to_others() -> None:
    for topology in (Topology.flat(4), Topology.parse("gpu=2,tile=2", 4), Topology.parse("node=1,gpu=4", 4)):
        assert overview.between_nodes("flat", topology) == 0


def test_rows_say_what_a_side_came_to() -> None:
    stock = run("stock", 0.9, 1.0, 1.1)
    exact = run("exact", 0.6, 0.7, 0.8, ratio_to_stock=0.7, bytes={"gpu": 500, "node": 2000})
    far = {"latents": {"bit_equal": False}, "image": {"psnr_db": 43.21, "path": "q.png"}}
    far["codecs"] = {}
    fast = run("fast", 0.25, 0.25, 0.25, ratio_to_stock=0.25, bytes={"node": 120, "gpu": 500}, **far)
    chance = run("paper", 0.85, 0.89, 0.95, ratio_to_stock=0.89, **far)
    slow = run("slow", 1.2, 1.25, 1.3, ratio_to_stock=1.25, latents={"bit_equal": False}, codecs=None)
    sides = setting(stock, exact, fast, chance, slow, title="Slow links")
    found = [tuple(vars(row).values()) for row in sides.rows()]
    assert found == [
        ("stock", "1.00 s (0.90 to 1.10)", "-", "2.00 kB", "-", "-"),
        ("exact", "700 ms (600 to 800)", "1.43x", "2.00 kB", "equal", "bit-identical"),
        ("fast", "250 ms (250 to 250)", "4.00x", "120 B", "43.2 dB", "approximated"),
        ("paper", "890 ms (850 to 950)", "no significant difference", "2.00 kB", "43.2 dB", "approximated"),
        ("slow", "1.25 s (1.20 to 1.30)", "0.80x (slower)", "2.00 kB", "-", "differs"),
    ]
    assert sides.sentence() == (
        "Slow links: exact speedup 1.43x, bit-identical; fast speedup 4.00x, PSNR 43.2 dB to stock; paper no "
        "significant difference in speed, PSNR 43.2 dB to stock; slow speedup 0.80x (slower), differs."
    )


def test_bytes_are_of_all_links_where_no_nodes_are_known() -> None:
    stock, exact = run("stock", 1.0), run("exact", 1.0, topology="gpu=4", bytes={"gpu": 3000})
    alike = setting(stock, exact)
    assert [row.sent for row in alike.rows()] == ["3.00 kB"] * 2
    assert overview.columns([alike])[3] == "sent"
    on_nodes = setting(stock, run("exact", 1.0))
    assert overview.columns([on_nodes])[3] == "sent between nodes"
    compiled = setting(*(run(name, 1.0, bytes=None) for name in ("stock", "exact")))
    assert [row.sent for row in compiled.rows()] == ["-"] * 2
    left = setting(stock, run("exact", 1.0, topology=None))
    assert [row.sent for row in left.rows()] == ["3.00 kB"] * 2


def test_a_table_is_aligned_and_says_whose_rows_are_whose() -> None:
    stock, exact = run("stock", 0.0123, 0.0124, 0.0125), run("exact", 0.01, ratio_to_stock=0.8)
    one, other = setting(stock, exact), setting(stock, title="Slow links")
    assert overview.table([one]).splitlines() == [
        "                     step time              speedup   sent between nodes   PSNR to stock   result",
        "stock   12.4 ms (12.3 to 12.5)                    -              2.00 kB               -   -",
        "exact                  10.0 ms   1.25x (one repeat)              2.00 kB           equal   bit-identical",
    ]
    both = overview.table([one, other]).splitlines()
    assert [line for line in both if not line.startswith(("stock", "exact", " "))] == [one.title, "Slow links"]


def test_links_are_called_by_what_they_are() -> None:
    runs = [run("stock", 1.0), run("exact", 1.0)]
    assert setting(*runs).title == "Links of this machine"
    cluster = {"preset": "pcie", "topology": "node=2,gpu=2"}
    assert setting(*runs, cluster=cluster, title=None).title == "Emulated pcie links, node=2,gpu=2"
    assert setting(*runs, cluster=cluster, title="Mine").title == "Mine"


def test_an_earlier_comparison_must_be_whole(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no folder of a comparison that came to its end"):
        Setting.read(tmp_path)
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(ValueError, match="came to its end: 'runs'"):
        Setting.read(tmp_path)


def cluster(topology: str, **rates: float) -> Cluster:
    ranks = Topology.parse(topology)
    return Cluster(ranks, rates, tuple(map(str, range(ranks.size))))


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_links_are_slowed_down_to_a_share_of_a_step(share: float) -> None:
    """Simulated message by message: a rank of 2 x 2 sends as much to every other rank, and two of them are away."""
    one = setting(run("stock", 0.2, bytes={"flat": 3 * 10_000}), run("exact", 0.2))
    built = cluster("node=2,gpu=2", node=2.5, gpu=80.0)
    scale = emulate.scale_for(share, built, one)
    bytes_per_second = scale * 2.5e6 / 8
    added = emulate.OVER_BOUND * sum(
        10_000 / bytes_per_second for peer in itertools.product(range(2), range(2)) if peer[0] == 1
    )
    assert added / (added + 0.2) == pytest.approx(share)


@pytest.mark.parametrize(
    ("share", "built", "stock", "words"),
    [
        (1.0, cluster("2x2", node=1.0, gpu=1.0), {}, "--share 1 is not valid; valid are numbers between 0 and 1"),
        (0.0, cluster("2x2", node=1.0, gpu=1.0), {}, "--share 0 is not valid"),
        (0.5, cluster("2x2x2", node=1.0), {}, "which ran --ulysses_degree 4; the cluster has 8 ranks"),
        (0.5, cluster("2x2", node=1.0, gpu=1.0), {"bytes": None}, "give --scale"),
        (0.5, cluster("gpu=4", gpu=1.0), {}, "give --scale"),
    ],
)
def test_a_share_that_cannot_be(share: float, built: Cluster, stock: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        emulate.scale_for(share, built, setting(run("stock", 1.0, **stock), run("exact", 1.0)))
