"""What ranks have of a sequence comes together: xDiT's gather along the topology, against xDiT's own."""

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import ranks
from tests.engine.settings.test_ring_placement import FAST, profile
from tests.quick import slow, slow_but
from tests.xdit.attention.test_ring import ring_options, start
from xfuser_cocodiff.engine.comm.mesh import Mesh

WORLD = 8
DIMS = (0, 1, -2, -1)
SLOW = 1e6


def known(sizes: str, *speeds: float, direct: float | None = 1.0) -> dict[str, Any]:
    """A profile whose direct sends are so many times as fast, if they are known."""
    sends = direct and profile(sizes, *(direct * speed for speed in speeds))
    return {"profile": replace(profile(sizes, *speeds), direct=sends).to_json()}


def gather(rank: int, options: dict[str, Any], ring: int) -> tuple[list[str], dict[str, int]]:
    """By which plans it went, in the order of their stages, and the bytes that this rank sent along which axis in one
    gather of 96 bytes of float32."""
    from xfuser.core.distributed import get_sp_group

    start(rank, options, WORLD, ring)
    group, plans, sent = get_sp_group(), [], {}
    along = Mesh.all_gather

    def all_gather(mesh: Mesh, block: torch.Tensor, plan: Any) -> torch.Tensor:
        plans.append(str(plan))
        found = along(mesh, block, plan)
        for name, size in mesh.traffic.sent_bytes.items():
            sent[name] = sent.get(name, 0) + size
        return found

    generator = torch.Generator().manual_seed(rank)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        block = (torch.randn(2, 3, 4, generator=generator) * 100).to(dtype)
        for mine in (block, block.transpose(0, 2)):  # also where it does not lie as it reads
            for dim in DIMS:
                expected = inspect.unwrap(type(group).all_gather)(group, mine, dim)
                Mesh.all_gather = all_gather
                found = group.all_gather(mine, dim=dim)
                Mesh.all_gather = along
                assert torch.equal(found, expected) and found.stride() == expected.stride(), (dtype, dim)
                if (dtype, dim) == (torch.float32, 0) and mine is block:
                    first = list(plans), dict(sent)
            pieces = group.all_gather(mine, separate_tensors=True)
            expected = inspect.unwrap(type(group).all_gather)(group, mine, separate_tensors=True)
            assert len(pieces) == WORLD and all(map(torch.equal, pieces, expected))
    with pytest.raises(AssertionError, match=r"Invalid dim \(3\)"):
        group.all_gather(block, dim=3)
    return first


def one_group(folder: Path, record: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    options = {"use_cocodiff": True, "cocodiff_topology": "2x2x2", "cocodiff_mode": "exact", **more}
    if record:
        (folder / "profile.json").write_text(json.dumps(record))
        options["cocodiff_profile"] = str(folder / "profile.json")
    return options


def test_each_block_crosses_a_slow_link_once(tmp_path: Path) -> None:
    options = one_group(tmp_path, known("2x2x2", SLOW, 10 * SLOW, FAST))
    for plans, sent in ranks.run(gather, WORLD, options, 1):
        assert len(plans) == 1 and plans[0].startswith("hierarchical:node")
        assert sent["node"] == 96, "stock sends it to all four ranks of the other node"


@pytest.mark.parametrize(
    ("record", "more"),
    [
        slow(known("2x2x2", SLOW, FAST, FAST, direct=None), {}),  # on CPUs a part is not known
        (known("2x2x2", SLOW, SLOW, SLOW, direct=0.1), {}),  # one collective is the fastest way
        slow(None, {"cocodiff_a2a": "hierarchical"}),  # nothing is known
    ],
)
def test_elsewhere_it_is_stocks(tmp_path: Path, record: dict[str, Any] | None, more: dict[str, Any]) -> None:
    assert ranks.run(gather, WORLD, one_group(tmp_path, record, **more), 1) == [([], {})] * WORLD


@pytest.mark.parametrize(
    ("placement", "ring", "sizes"),
    slow_but(
        [("outer", 2, "2x4"), ("inner", 4, "2x4")],
        [("outer", 2, "2x4"), ("inner", 4, "2x4"), ("outer", 8, "2x4"), ("inner", 2, "4x2")],
    ),
)
def test_along_a_ring_too(tmp_path: Path, placement: str, ring: int, sizes: str) -> None:
    """Whose ranks are not neighbours: what comes must lie as the ranks of the sequence do."""
    file = tmp_path / "profile.json"
    file.write_text(json.dumps(known(sizes, SLOW, 100 * SLOW)))
    options = ring_options(placement, cocodiff_profile=str(file), cocodiff_mode="exact") | {"cocodiff_topology": sizes}
    for plans, _ in ranks.run(gather, WORLD, options, ring):
        assert len(plans) == (1 if ring == WORLD else 2)
