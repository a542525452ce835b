"""All-to-alls of a mesh on real ranks, against a simple reference."""

import dataclasses
import functools
import math
import warnings
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests import ranks
from xfuser_cocodiff.engine.attention.reshard import reshard
from xfuser_cocodiff.engine.comm import stages
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.policy import PlanPolicy
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.topology import devices
from xfuser_cocodiff.engine.topology.plans import candidates
from xfuser_cocodiff.engine.topology.topology import AXIS_NAMES, Topology


def local_tensor(rank: int, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor of a rank; every rank can compute it, so that the reference needs no communication."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(-100, 100, shape, generator=generator).to(dtype)


def reference(number: int, shape: tuple[int, ...], dtype: torch.dtype, scatter: int, gather: int) -> torch.Tensor:
    """Return the result of resharding by definition: this rank's chunk of each rank's tensor, concatenated."""
    world, own = dist.get_world_size(), dist.get_rank()
    chunks = [local_tensor(rank, number, shape, dtype).chunk(world, scatter)[own] for rank in range(world)]
    return torch.cat(chunks, gather)


def check_reshard(rank: int, sizes: list[int], shapes: list[tuple], dtype: torch.dtype) -> None:
    """Reshard back and forth by all plans, in one message and one tensor at a time."""
    topology = Topology.named(**dict(zip(AXIS_NAMES, sizes, strict=False)))
    mesh, plans = Mesh.over(dist.group.WORLD, topology), candidates(topology)
    tensors = [local_tensor(rank, number, shape, dtype) for number, shape in enumerate(shapes)]
    for plan in plans:
        by_plan = dataclasses.replace(mesh, policy=PlanPolicy.fixed(plan))
        for scatter, gather in ((1, 2), (2, 1)):
            together = reshard(tensors, scatter, gather, by_plan)
            alone = [reshard([tensor], scatter, gather, by_plan)[0] for tensor in tensors]
            back = reshard(together, gather, scatter, by_plan)
            for number, shape in enumerate(shapes):
                expected = reference(number, shape, dtype, scatter, gather)
                assert torch.equal(together[number], expected), plan
                assert together[number].is_contiguous(), plan
                assert torch.equal(alone[number], expected), plan
                assert torch.equal(back[number], tensors[number]), plan


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [([2, 2], torch.bfloat16), ([1, 5], torch.int8), ([2, 2, 2], torch.float32)],
    ids=str,
)
def test_every_plan_equals_the_reference(sizes: list[int], dtype: torch.dtype) -> None:
    size = math.prod(sizes)
    ranks.run(check_reshard, size, sizes, [(2, size, 2 * size, 3), (2, 2 * size, size, 1), (1, size, size, 5)], dtype)


def use_functional_collectives() -> None:
    """Give this rank's CPU the collectives of XPUs, and let all others fail."""
    cpu = dataclasses.replace(devices.capabilities("cpu"), functional_only=True)
    devices.capabilities = lambda device_type: cpu
    dist.all_to_all_single = stages._all_gather = None


def check_functional(rank: int) -> int:
    """Run all-to-alls and all-gathers by all plans and return the number of buffers that they allocate."""

    class Allocations(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.number += function is torch.ops.aten.empty.memory_format
            return function(*args, **(kwargs or {}))

    use_functional_collectives()
    topology, shape = Topology.parse("2x2"), (2, 8, 8, 3)
    mesh, tensor = Mesh.over(dist.group.WORLD, topology), local_tensor(rank, 0, shape, torch.bfloat16)
    with Allocations() as allocations, warnings.catch_warnings():
        warnings.simplefilter("error")
        for plan in candidates(topology):
            by_plan = dataclasses.replace(mesh, policy=PlanPolicy.fixed(plan))
            resharded = reshard([tensor], 1, 2, by_plan)[0]
            assert torch.equal(resharded, reference(0, shape, torch.bfloat16, 1, 2)), plan
            gathered = mesh.all_gather(tensor, plan).flatten(0, -len(shape) - 1)
            blocks = [local_tensor(each, 0, shape, torch.bfloat16) for each in range(topology.size)]
            assert torch.equal(gathered, torch.stack(blocks)), plan
    return allocations.number


def test_functional_collectives_equal_the_reference_and_receive_into_their_own_buffer() -> None:
    """Those of XPUs, where the others corrupt data; a buffer for them would only take memory."""
    assert ranks.run(check_functional, 4) == [0] * 4


def subgroups(rank: int) -> list[list[int]]:
    """Reshard in two Ulysses groups of four, as with CFG or data parallelism; one of them creates its mesh later."""
    halves = [dist.new_group([0, 1, 2, 3]), dist.new_group([4, 5, 6, 7])]
    own = halves[rank // 4]
    if rank >= 4:  # groups are created by their members only, so that halves need not synchronize
        dist.barrier(own)
    mesh = Mesh.over(own, Topology.parse("2x2", 4))
    resharded = reshard([torch.full((1, 4, 1, 1), float(rank))], 1, 2, mesh)[0]
    return resharded.flatten().tolist()


def test_groups_are_independent() -> None:
    results = ranks.run(subgroups, 8)
    assert results[:4] == [[0.0, 1.0, 2.0, 3.0]] * 4
    assert results[4:] == [[4.0, 5.0, 6.0, 7.0]] * 4


def make_meshes(rank: int) -> tuple[list[tuple[int, ...]], list[object]]:
    """Return the ranks of the groups that two meshes and their partitions create, and the device to which the world is
    bound during each creation and afterwards."""
    world, created, bound = dist.group.WORLD, [], []
    world.bound_device_id = torch.device("cuda", 0)
    new_group = dist.new_group

    def record(members: tuple[int, ...], **options: object) -> dist.ProcessGroup:
        created.append(tuple(members))
        bound.append(world.bound_device_id)
        return new_group(members, **options)

    with mock.patch.object(dist, "new_group", record):
        topology = Topology.parse("2x2x2", 8)
        for _ in range(2):
            mesh = Mesh.over(world, topology)
            for slow in (("node",), ("node", "gpu"), ("node", "gpu", "tile")):
                AxisPartition.over(world, mesh, slow, Mesh.over)
    bound.append(world.bound_device_id)
    world.bound_device_id = None  # no such device: the last barrier would use it
    return created, bound


def test_each_set_of_ranks_has_one_communicator() -> None:
    """It is created by its members only, also where NCCL would split it off a world that is bound to a device."""
    for rank, (created, bound) in enumerate(ranks.run(make_meshes, 8)):
        assert len(created) == len(set(created)) and all(rank in members for members in created)
        assert bound == [None] * len(created) + [torch.device("cuda", 0)]


def timeouts(rank: int) -> tuple[list[timedelta], set[timedelta]]:
    """Return the timeouts of the user's group and of the groups of a mesh and a partition with their own timeout."""
    world, topology = dist.group.WORLD, Topology.parse("2x2", 4)
    mesh = Mesh.over(world, topology, timeout=timedelta(seconds=7))
    partition = AxisPartition.over(world, mesh, ("node",), functools.partial(Mesh.over, timeout=timedelta(seconds=7)))
    again = Mesh.over(world, topology, timeout=timedelta(seconds=7))
    assert again.stages.groups == mesh.stages.groups
    groups = [group for each in (mesh, partition.slow, partition.fast) for group in each.stages.groups.values()]
    plain = Mesh.over(world, topology)
    return [_timeout(world), _timeout(plain.stages.groups[0, 1])], set(map(_timeout, groups))


def _timeout(group: dist.ProcessGroup) -> timedelta:
    return group._get_backend(torch.device("cpu")).options._timeout


def test_mesh_keeps_the_timeout_of_its_group() -> None:
    for own, created in ranks.run(timeouts, 4):
        assert own == [dist.distributed_c10d.default_pg_timeout] * 2
        assert created == {timedelta(seconds=7)}
