"""All-gather of a sequence along the topology, against xDiT's own."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ranks
from tests.quick import slow
from tests.xdit.attention.test_ring import ring_options, start
from tests.xdit.settings.test_ring_placement import FAST, profile
from xfuser_cocodiff.engine.comm.mesh import Mesh

WORLD = 8
DIMS = (0, 1, -2, -1)
SLOW = 1e6


def profile_json(sizes: str, *speeds: float) -> dict[str, Any]:
    """Return a link profile."""
    return {"profile": profile(sizes, *speeds).to_json()}


def gather(rank: int, options: dict[str, Any], ring: int) -> tuple[list[str], dict[str, int]]:
    """Check gathers against stock, and return the plans of the first one and the bytes that this rank sent per axis.

    The first one gathers 96 bytes of float32.
    """
    from xfuser.core.distributed import get_sp_group

    start(rank, options, WORLD, ring)
    group, plans, sent = get_sp_group(), [], {}
    original = Mesh.all_gather

    def all_gather(mesh: Mesh, block: torch.Tensor, plan: Any) -> torch.Tensor:
        plans.append(str(plan))
        gathered = original(mesh, block, plan)
        for name, size in mesh.traffic.sent_bytes.items():
            sent[name] = sent.get(name, 0) + size
        return gathered

    generator = torch.Generator().manual_seed(rank)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        block = (torch.randn(2, 3, 4, generator=generator) * 100).to(dtype)
        for local in (block, block.transpose(0, 2)):  # also a tensor that is not contiguous
            for dim in DIMS:
                expected = inspect.unwrap(type(group).all_gather)(group, local, dim)
                Mesh.all_gather = all_gather
                found = group.all_gather(local, dim=dim)
                Mesh.all_gather = original
                assert torch.equal(found, expected) and found.stride() == expected.stride(), (dtype, dim)
                if (dtype, dim) == (torch.float32, 0) and local is block:
                    first = list(plans), dict(sent)
            pieces = group.all_gather(local, separate_tensors=True)
            expected = inspect.unwrap(type(group).all_gather)(group, local, separate_tensors=True)
            assert len(pieces) == WORLD and all(map(torch.equal, pieces, expected))
    with pytest.raises(AssertionError, match=r"Invalid dim \(3\)"):
        group.all_gather(block, dim=3)
    return first


def options_of(folder: Path, record: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    options = {"use_cocodiff": True, "cocodiff_topology": "2x2x2", "cocodiff_mode": "exact", **more}
    if record:
        (folder / "profile.json").write_text(json.dumps(record))
        options["cocodiff_profile"] = str(folder / "profile.json")
    return options


def test_block_crosses_a_slow_link_once(tmp_path: Path) -> None:
    options = options_of(tmp_path, profile_json("2x2x2", SLOW, 10 * SLOW, FAST))
    for plans, sent in ranks.run(gather, WORLD, options, 1):
        assert len(plans) == 1 and plans[0].startswith("hierarchical:node")
        assert sent["node"] == 96, "stock sends it to all four ranks of the other node"


@pytest.mark.parametrize(
    ("record", "more"),
    [
        (profile_json("2x2x2", FAST, FAST, SLOW), {}),  # one flat collective is fastest
        slow(None, {"cocodiff_a2a": "hierarchical"}),  # links are not measured
    ],
)
def test_falls_back_to_stock(tmp_path: Path, record: dict[str, Any] | None, more: dict[str, Any]) -> None:
    assert ranks.run(gather, WORLD, options_of(tmp_path, record, **more), 1) == [([], {})] * WORLD


@pytest.mark.parametrize(
    ("placement", "ring", "sizes"),
    [slow("outer", 2, "2x4"), ("inner", 4, "2x4"), slow("outer", 8, "2x4"), slow("inner", 2, "4x2")],
)
def test_gather_over_a_ring_keeps_the_order_of_ranks(tmp_path: Path, placement: str, ring: int, sizes: str) -> None:
    """Ranks of one of the groups are not neighbors, and blocks must be in the order of the sequence."""
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(profile_json(sizes, SLOW, 100 * SLOW)))
    options = ring_options(placement, cocodiff_profile=str(file), cocodiff_mode="exact") | {"cocodiff_topology": sizes}
    for plans, _ in ranks.run(gather, WORLD, options, ring):
        assert len(plans) == (1 if ring == WORLD else 2)
