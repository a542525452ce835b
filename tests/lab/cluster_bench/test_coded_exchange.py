"""How lossy modes cross slow axes, by topology and split; `test_recorded_exchange.py` compares it with the plugin."""

from typing import Any

import pytest

from xfuser_cocodiff.lab.cluster_bench.coded_exchange import coded_exchanges


def exchanges(
    variant: str, topology: str, slow_axes: list[str], split: tuple[int, int], **more: Any
) -> tuple[str, ...]:
    row = {"variant": variant, "split": dict(zip(("ulysses", "ring"), split, strict=True))}
    return coded_exchanges({"topology": topology, "slow_axes": slow_axes}, row, **more)


@pytest.mark.parametrize(
    ("split", "expected"), [((16, 1), ("kv",)), ((8, 2), ("ring",)), ((2, 8), ("ring",)), ((1, 16), ("ring",))]
)
def test_two_nodes_gather_unless_a_ring_crosses_them(split: tuple[int, int], expected: tuple[str, ...]) -> None:
    assert exchanges("fast", "node=2,gpu=8", ["node"], split) == expected


def test_more_coordinates_are_crossed_by_heads() -> None:
    assert exchanges("balanced", "node=4,gpu=4", ["node"], (16, 1)) == ("heads",)
    assert exchanges("balanced", "node=4,gpu=4", ["node"], (16, 1), heads=(64, 16)) == ("kv",)
    assert exchanges("balanced", "node=4,gpu=4", ["node"], (16, 1), heads=(24, 24)) == ("heads",)
    assert exchanges("balanced", "node=4,gpu=4", ["node"], (16, 1), heads=(8, 8)) == ("kv",)  # by heads, 16 with zeros
    assert exchanges("balanced", "node=2,gpu=6,tile=2", ["node", "gpu"], (24, 1)) == ("heads",)


def test_beside_a_ring_and_on_inner_axes_nothing_is_gathered() -> None:
    assert exchanges("balanced", "node=4,gpu=4", ["node"], (8, 2)) == ("heads", "ring")
    assert exchanges("balanced", "node=3,gpu=2", ["gpu"], (6, 1)) == ("heads",)
    assert exchanges("paper", "node=2,gpu=8", ["node"], (16, 1)) == ("heads",)


def test_lossless_variants_encode_nothing() -> None:
    for variant in ("exact", "exact 12x2", "stock", "stock-combined 12x2", "v-first", "fp4"):
        assert exchanges(variant, "node=2,gpu=8", ["node"], (16, 1)) == ()
    assert exchanges("balanced", "gpu=8", [], (8, 1)) == ()
