"""The exchange on real ranks, against a slow reference and its own algebra."""

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import ranks
from xfuser_cocodiff.collectives import Mesh
from xfuser_cocodiff.exchange import reshard
from xfuser_cocodiff.topology import AXIS_NAMES, Topology

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
# Each example starts ranks, which is slow by hypothesis' measure and quick by ours.
on_ranks = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


def local_tensor(rank: int, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What rank `rank` holds: known to everybody, so that a reference needs no communication."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


def reference(number: int, shape: tuple[int, ...], dtype: torch.dtype, scatter: int, gather: int) -> torch.Tensor:
    """Resharding by its definition: my share of everybody's tensor, put together."""
    world, here = dist.get_world_size(), dist.get_rank()
    shares = [local_tensor(rank, number, shape, dtype).chunk(world, scatter)[here] for rank in range(world)]
    return torch.cat(shares, gather)


def check_reshard(rank: int, sizes: list[int], order: list[int], shapes: list[tuple], dtype: torch.dtype) -> dict:
    world = dist.get_world_size()
    mesh = Mesh.over(dist.group.WORLD, Topology.named(**dict(zip(AXIS_NAMES, sizes, strict=False))), order)
    flat = Mesh.over(dist.group.WORLD, Topology.flat(world))
    tensors = [local_tensor(rank, number, shape, dtype) for number, shape in enumerate(shapes)]
    for scatter, gather in ((1, 2), (2, 1)):
        got = reshard(tensors, scatter, gather, mesh)
        alone = [reshard([tensor], scatter, gather, mesh)[0] for tensor in tensors]
        by_flat = reshard(tensors, scatter, gather, flat)
        back = reshard(got, gather, scatter, mesh)
        for number, shape in enumerate(shapes):
            expected = reference(number, shape, dtype, scatter, gather)
            assert torch.equal(got[number], expected)
            assert got[number].is_contiguous()
            assert torch.equal(alone[number], expected)
            assert torch.equal(by_flat[number], expected)
            assert torch.equal(back[number], tensors[number])
    return {"bytes": dict(mesh.traffic.sent_bytes), "calls": dict(mesh.traffic.calls)}


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Axis sizes (1, primes and composites among them) of at most 12 ranks, and an order of phases."""
    sizes = draw(
        st.lists(st.sampled_from([1, 2, 3, 4, 5, 7]), min_size=1, max_size=3).filter(
            lambda sizes: 2 <= torch.Size(sizes).numel() <= 12
        )
    )
    return sizes, draw(st.permutations(range(len(sizes))))


@on_ranks
@given(world=worlds(), dtype=st.sampled_from(DTYPES), data=st.data())
def test_reshard_equals_its_definition(world: tuple, dtype: torch.dtype, data: st.DataObject) -> None:
    sizes, order = world
    size = torch.Size(sizes).numel()
    multiples = st.integers(1, 3).map(lambda n: n * size)
    batch, depth = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    shapes = [(batch, data.draw(multiples), data.draw(multiples), depth) for _ in range(data.draw(st.integers(1, 4)))]
    ranks.run(check_reshard, size, sizes, order, shapes, dtype)


def test_bytes_are_those_that_leave_the_rank() -> None:
    shape, dtype = (2, 24, 12, 8), torch.bfloat16
    results = ranks.run(check_reshard, 12, [2, 3, 2], [2, 1, 0], [shape], dtype)
    message = 2 * 24 * 12 * 8 * 2
    exchanges = 6  # in each direction: together, alone, back
    for result in results:
        assert result["bytes"] == {
            "node": exchanges * message // 2,
            "gpu": exchanges * message * 2 // 3,
            "tile": exchanges * message // 2,
        }
        assert result["calls"] == dict.fromkeys(("node", "gpu", "tile"), exchanges)


def count_copies(rank: int) -> list[tuple[int, int]]:
    """Elements copied (by copy_ or clone) while resharding, over the elements of the tensor, for each topology."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Copies(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if function in (torch.ops.aten.copy_.default, torch.ops.aten.clone.default):
                self.elements += result.numel()
            return result

    found = []
    for sizes in ([8], [4, 2], [2, 2, 2]):
        mesh = Mesh.over(dist.group.WORLD, Topology.named(**dict(zip(AXIS_NAMES, sizes, strict=False))))
        tensors = [torch.randn(2, 8, 16, 4) for _ in range(3)]
        with Copies() as copies:
            reshard(tensors, 1, 2, mesh)
        found.append((len(sizes), copies.elements // sum(tensor.numel() for tensor in tensors)))
    return found


def test_no_phase_copies_more_than_once() -> None:
    for found in ranks.run(count_copies, 8):
        # One copy into the first phase, one between phases, one out: stock's flat call has two.
        assert found == [(1, 2), (2, 3), (3, 4)]


def subgroups(rank: int) -> list[list[int]]:
    """Two Ulysses groups of four in one world, as beside CFG or data parallelism; only one of them has a mesh first."""
    halves = [dist.new_group([0, 1, 2, 3]), dist.new_group([4, 5, 6, 7])]
    mine = halves[rank // 4]
    if rank >= 4:  # groups are made by their members alone: the halves need not march in step
        dist.barrier(mine)
    mesh = Mesh.over(mine, Topology.parse("2x2", 4))
    got = reshard([torch.full((1, 4, 1, 1), float(rank))], 1, 2, mesh)[0]
    return got.flatten().tolist()


def test_groups_beside_each_other() -> None:
    results = ranks.run(subgroups, 8)
    assert results[:4] == [[0.0, 1.0, 2.0, 3.0]] * 4
    assert results[4:] == [[4.0, 5.0, 6.0, 7.0]] * 4


def wrong_size(rank: int) -> str:
    try:
        Mesh.over(dist.group.WORLD, Topology.parse("2x2", 4))
    except ValueError as error:
        return str(error)
    return "no error"


def test_mesh_of_the_wrong_size() -> None:
    assert ranks.run(wrong_size, 2) == ["topology node=2,gpu=2 has 4 ranks, the group has 2"] * 2
