"""Detection of ranks per node and tiles per GPU from the launcher's environment variables.

Sources: torchrun, PALS (Aurora), SLURM, Open MPI and Intel MPI variables; Level Zero's ZE_FLAT_DEVICE_HIERARCHY, which
decides whether a device is a tile or a whole GPU.
"""

import re
from collections.abc import Mapping

from xfuser_cocodiff.engine.topology.topology import Topology

_LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",  # torchrun
    "PALS_LOCAL_SIZE",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
    "SLURM_NTASKS_PER_NODE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
)
CLUSTER_VARIABLE = "COCODIFF_CLUSTER"
"""Environment variable that describes an emulated cluster to its ranks, as JSON."""


def ranks_per_node(environment: Mapping[str, str]) -> int | None:
    """Return the number of ranks per node; None if no launcher sets it or nodes differ."""
    for name in _LOCAL_SIZES:
        if value := environment.get(name):
            return _uniform_count(value)
    return None


def _uniform_count(value: str) -> int | None:
    """Parse '12' or SLURM's '12(x4)'; return None for '12(x3),8', where nodes differ."""
    match = re.fullmatch(r"(\d{1,9})(\(x\d+\))?", value.strip())
    return int(match[1]) if match and int(match[1]) > 0 else None


def tiles_per_gpu(environment: Mapping[str, str], device_name: str = "") -> int:
    """Return the number of ranks per GPU that result from one rank per tile.

    Args:
        environment: environment of the process.
        device_name: name of the device in its driver; empty if there is none.

    Returns:
        2 where Level Zero presents the tiles of a two-tile Intel GPU as devices (its default), else 1.
    """
    two_tiles = "Max 1550" in device_name or "Max 1450" in device_name
    hierarchy = environment.get("ZE_FLAT_DEVICE_HIERARCHY", "FLAT" if two_tiles else "").upper()
    tiles_are_devices = hierarchy in ("FLAT", "COMBINED")
    return 2 if tiles_are_devices and (two_tiles or not device_name) else 1


def detect(degree: int, environment: Mapping[str, str], device_name: str = "") -> Topology:
    """Return the topology of the Ulysses groups of `degree` consecutive ranks, as far as the launcher tells.

    It is flat if groups would be divided unevenly by nodes, or if no launcher sets the ranks per node.

    Args:
        degree: number of ranks of a group.
        environment: environment of the process.
        device_name: name of the device in its driver; empty if there is none.
    """
    local = ranks_per_node(environment) or degree
    tiles = tiles_per_gpu(environment, device_name)
    inside = min(local, degree)
    if degree % inside or local % inside:
        return Topology.flat(degree)
    if inside % tiles or local % tiles:
        tiles = 1
    sizes = {"node": degree // inside, "gpu": inside // tiles, "tile": tiles}
    named = {name: size for name, size in sizes.items() if size > 1}
    # Processes started by other means within a SLURM job see the job's variables too.
    if named.get("node", 1) > (_uniform_count(environment.get("SLURM_NNODES", "")) or degree):
        return Topology.flat(degree)
    return Topology.named(**named) if len(named) > 1 or "node" in named else Topology.flat(degree)
