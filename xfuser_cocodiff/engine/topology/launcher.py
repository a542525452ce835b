"""What the launcher says about the machine: ranks per node, this rank's device, tiles per GPU.

Sources: torchrun, PALS (Aurora), SLURM, Open MPI and Intel MPI variables; Level Zero's ZE_FLAT_DEVICE_HIERARCHY, which
decides whether a device is a tile or a whole GPU, and ZE_AFFINITY_MASK, which hides devices; oneCCL's CCL_OP_SYNC.
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

CLUSTER_VARIABLE = "COCODIFF_CLUSTER"
"""Environment variable in which every rank of an emulated cluster finds what it is, as JSON."""
SHARE_FIELD, SHARE_VARIABLE = "cocodiff_share_device", "COCODIFF_SHARE_DEVICE"
"""Option by which the user says that several ranks have one device."""


def ranks_per_node(environment: Mapping[str, str]) -> int | None:
    """Ranks on this node, or None when no launcher says so or nodes differ."""
    for name in _LOCAL_SIZES:
        if value := environment.get(name):
            return _uniform_count(value)
    return None


def _uniform_count(value: str) -> int | None:
    """Read '12' or SLURM's '12(x4)'; None for '12(x3),8', where nodes differ."""
    match = re.fullmatch(r"(\d+)(\(x\d+\))?", value.strip())
    return int(match[1]) if match and int(match[1]) > 0 else None


def local_rank(environment: Mapping[str, str]) -> int:
    """This rank's number on its node; 0 when no launcher says so.

    Raises:
        ValueError: what a launcher's variable says is no number.
    """
    for name in _LOCAL_RANKS:
        if value := environment.get(name):
            if not value.isdecimal():
                raise ValueError(f"{name}={value!r} is not valid; valid are numbers from 0")
            return int(value)
    return 0


def device_index(rank: int, environment: Mapping[str, str]) -> int:
    """The XPU of a rank by its number on the node; 0 where ZE_AFFINITY_MASK shows each rank its own tile alone."""
    mask = environment.get("ZE_AFFINITY_MASK", "")
    return 0 if mask and "," not in mask else rank


def shares_device(environment: Mapping[str, str], arguments: Sequence[str], devices: int) -> bool:
    """Whether several ranks of this node have one device: there are more ranks than devices, or the user says so.

    Asked before any option is parsed, since xDiT starts its backend before it has parsed them all.

    Args:
        environment: of the process.
        arguments: of the command.
        devices: that this process sees.
    """
    asked = environment.get(SHARE_VARIABLE, "").strip().lower() not in ("", "0", "false", "no", "off")
    asked = asked or any(argument.replace("-", "_") == f"__{SHARE_FIELD}" for argument in arguments)
    # A rank that sees one device of several may well be alone on it.
    hidden = any(environment.get(name) for name in ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")) and devices == 1
    return asked or (not hidden and devices > 0 and (ranks_per_node(environment) or 1) > devices)


def collectives_are_synchronous(environment: Mapping[str, str]) -> bool:
    """Whether oneCCL runs every collective to its end before it goes on (CCL_OP_SYNC), so that none is ever hidden."""
    return environment.get("CCL_OP_SYNC", "").strip().lower() in ("1", "true", "yes", "on", "y", "t")


def tiles_per_gpu(environment: Mapping[str, str], device_name: str = "") -> int:
    """Ranks that share a GPU because each drives one of its tiles.

    Args:
        environment: process environment.
        device_name: what the driver calls the device; empty when there is none.

    Returns:
        2 where Level Zero hands out the tiles of a two-tile Intel GPU as devices (its default), else 1.
    """
    two_tiles = "Max 1550" in device_name or "Max 1450" in device_name
    hierarchy = environment.get("ZE_FLAT_DEVICE_HIERARCHY", "FLAT" if two_tiles else "").upper()
    tiles_are_devices = hierarchy in ("FLAT", "COMBINED")
    return 2 if tiles_are_devices and (two_tiles or not device_name) else 1


def detect(degree: int, environment: Mapping[str, str], device_name: str = "") -> Topology:
    """Topology of every Ulysses group of `degree` neighbouring ranks, as far as the launcher tells.

    Groups that would straddle nodes unevenly, and machines that say nothing, are flat.
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
    # Variables of a SLURM job stand in processes too that something else has started inside of it.
    if named.get("node", 1) > int(environment.get("SLURM_NNODES") or degree):
        return Topology.flat(degree)
    return Topology.named(**named) if len(named) > 1 or "node" in named else Topology.flat(degree)
