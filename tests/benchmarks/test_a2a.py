"""The all-to-all alone on real ranks: a record with consistent figures, and no time of a plan with other bits."""

from statistics import median
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks import a2a
from tests import ranks
from xfuser_cocodiff.engine.topology import planner
from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.topology import Topology


def stock(tensor: torch.Tensor) -> torch.Tensor:
    """Reference all-to-all: gather all tensors and take this rank's heads of each."""
    world, here = dist.get_world_size(), dist.get_rank()
    everybody = [torch.empty_like(tensor) for _ in range(world)]
    dist.all_gather(everybody, tensor)
    return torch.cat([one.chunk(world, 1)[here] for one in everybody], 2)


def bench_a2a(rank: int) -> dict:
    return a2a.measure(dist.group.WORLD, Topology.parse("2x2", 4), stock, [1000, 2**16], 3)


def test_bench_a2a_returns_a_record() -> None:
    records = ranks.run(bench_a2a, 4)
    for row in zip(*(record["rows"] for record in records), strict=True):
        assert all(other == row[0] for other in row)
    record = records[0]
    assert {row["bytes_per_rank"] for row in record["rows"]} == {1024, 2**16}
    for size in (1024, 2**16):
        rows = {row["algorithm"]: row for row in record["rows"] if row["bytes_per_rank"] == size}
        assert {"stock", "flat", "hierarchical:gpu,node", "auto"} <= rows.keys()
        assert rows["stock"]["ratio_to_stock"] == 1
        for row in rows.values():
            assert len(row["seconds"]) == 3
            pairs = zip(row["seconds"], rows["stock"]["seconds"], strict=True)
            assert row["ratio_to_stock"] == median(ours / theirs for ours, theirs in pairs)
        assert rows["auto"]["plan"] == str(planner.choose_plan(Profile.from_json(record["profile"]), size))
    a2a.show(record)


def bench_a_wrong_plan(rank: int) -> str:
    with mock.patch.object(a2a, "reshard", lambda tensors, *rest: [tensors[0].flip(2).reshape(1, 1, -1, 8)]):
        try:
            bench_a2a(rank)
        except RuntimeError as error:
            return str(error)
    return "no error"


def test_bench_a2a_detects_a_wrong_plan() -> None:
    assert all("the output of plan 'flat' differs from stock's" in said for said in ranks.run(bench_a_wrong_plan, 4))
