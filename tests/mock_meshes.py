"""Meshes on the mock device: process groups that only have a size, plans, and slow and fast axes."""

import functools
import math
from types import SimpleNamespace

import torch

from tests.mock_device import register_mock_device
from xfuser_cocodiff.engine.codec import active_tokens, quantize
from xfuser_cocodiff.engine.comm.comm_stream import CommStream
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.policy import PlanPolicy
from xfuser_cocodiff.engine.comm.stages import Stages
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.topology import devices
from xfuser_cocodiff.engine.topology.plans import Plan, Stage
from xfuser_cocodiff.engine.topology.topology import Topology

TOPOLOGY = Topology.parse("2x2", 4)


@functools.cache
def device() -> torch.device:
    """Return the mock device of this process."""
    return register_mock_device()


def use_capabilities_of(device_type: str) -> None:
    """Give the mock device of this process the capabilities of a device type."""
    known = devices.capabilities
    devices.capabilities = lambda asked: known(device_type if asked == "mock" else asked)


def make_tables() -> None:
    """Replace tables that a process creates once, by copies that the host waits for."""
    scales = torch.zeros(256, device=device())
    shifts = torch.zeros(8, dtype=torch.uint8, device=device())
    weights = {grid: torch.zeros(grid.per_unit, device=device()) for grid in quantize.GRIDS.values()}
    digits = {grid: torch.zeros(65536, grid.per_unit, device=device()) for grid in quantize.GRIDS.values()}
    quantize.scale_table, quantize._weights = lambda _: scales, lambda grid, _: weights[grid]
    quantize._digits = lambda grid, _: digits[grid]
    quantize.int8_widths = quantize.int8_inverses = lambda _: scales
    thresholds = torch.zeros(quantize.PER_OCTAVE, dtype=torch.int32, device=device())
    quantize._int8_thresholds = lambda _: thresholds
    active_tokens._shifts = lambda _: shifts


def group_of(stage: Stage, topology: Topology) -> SimpleNamespace:
    """Return a mock process group of a stage."""
    size = math.prod(topology.shape[dim] for dim in stage)
    return SimpleNamespace(size=lambda: size, rank=lambda: 0)


def mesh_of(plan: str, staged: bool, topology: Topology = TOPOLOGY, comm_stream: CommStream | None = None) -> Mesh:
    """Return a mesh of mock process groups."""
    parsed = Plan.parse(plan, topology)
    plans = parsed, Plan.hierarchical_gather(topology)
    groups = {stage: group_of(stage, topology) for plan in plans for stage in plan.stages}
    stages = Stages(groups, device(), staged)
    return Mesh(topology, stages, PlanPolicy.fixed(parsed), comm_stream or CommStream.on(device(), staged))


GATHERED = "node, K and V gathered"
SLOW = ["node", "all", GATHERED]
"""The slow axes, and whether K and V are gathered along them."""


def partition_of(slow: str, staged: bool) -> tuple[Mesh, AxisPartition]:
    """Return a mesh of nodes and GPUs, and its slow and fast axes."""
    mesh = mesh_of("hierarchical", staged)
    if slow == "all":
        return mesh, AxisPartition(TOPOLOGY.size, 1, 0, mesh, None)
    parts = [mesh_of("flat", staged, Topology.named(**{name: 2})).as_part_of(mesh, name) for name in ("node", "gpu")]
    return mesh, AxisPartition(*TOPOLOGY.shape, 0, *parts)
