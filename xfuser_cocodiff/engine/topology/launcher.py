"""Detection of ranks per node, local rank, device and tiles per GPU from the launcher's environment variables.

Sources: torchrun, PALS (Aurora), SLURM, Open MPI and Intel MPI variables; Level Zero's ZE_FLAT_DEVICE_HIERARCHY, which
decides whether a device is a tile or a whole GPU; masks that hide devices; oneCCL's CCL_OP_SYNC.
"""

import re
from collections.abc import Mapping, Sequence

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
_LOCAL_RANKS = (
    "LOCAL_RANK",  # torchrun
    "PALS_LOCAL_RANKID",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
)

_DEVICE_MASKS = (
    "CUDA_VISIBLE_DEVICES",
    *("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),  # ROCm
    "ZE_AFFINITY_MASK",
)
"""Variables by which a launcher or a user hides devices."""

CLUSTER_VARIABLE = "COCODIFF_CLUSTER"
"""Environment variable that describes an emulated cluster to its ranks, as JSON."""
SHARE_FIELD, SHARE_VARIABLE = "cocodiff_share_device", "COCODIFF_SHARE_DEVICE"
"""Option and environment variable that declare several ranks to share one device."""


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


def local_rank(environment: Mapping[str, str]) -> int:
    """Return the rank of this process on its node; 0 if no launcher sets it.

    Raises:
        ValueError: the launcher's variable is not a number.
    """
    for name in _LOCAL_RANKS:
        if value := environment.get(name):
            if not value.isdecimal():
                raise ValueError(f"{name}={value!r} is not valid; valid are numbers from 0")
            return int(value)
    return 0


def device_index(rank: int, environment: Mapping[str, str]) -> int:
    """Return the XPU index of a local rank; 0 where ZE_AFFINITY_MASK shows each rank its own tile only."""
    mask = environment.get("ZE_AFFINITY_MASK", "")
    return 0 if mask and "," not in mask else rank


def shares_device(environment: Mapping[str, str], arguments: Sequence[str], devices: int) -> bool:
    """Return whether ranks of this node share a device: there are more ranks than devices, or the user declares it.

    The option is looked up in unparsed arguments, since xDiT starts its backend before it has parsed all of them.

    Args:
        environment: environment of the process.
        arguments: command-line arguments.
        devices: number of devices that this process sees.
    """
    is_declared = environment.get(SHARE_VARIABLE, "").strip().lower() not in ("", "0", "false", "no", "off")
    is_declared = is_declared or any(argument.replace("-", "_") == f"__{SHARE_FIELD}" for argument in arguments)
    # A rank that sees one device of several probably has it to itself.
    is_masked = any(environment.get(name) for name in _DEVICE_MASKS) and devices == 1
    return is_declared or (not is_masked and devices > 0 and (ranks_per_node(environment) or 1) > devices)


def collectives_are_synchronous(environment: Mapping[str, str]) -> bool:
    """Return whether oneCCL blocks in every collective (CCL_OP_SYNC), so that no communication is hidden."""
    return environment.get("CCL_OP_SYNC", "").strip().lower() in ("1", "true", "yes", "on", "y", "t")


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
