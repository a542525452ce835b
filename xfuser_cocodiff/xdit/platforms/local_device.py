"""The local rank of this process, its device, and whether others share it.

Sources: variables of torchrun, PALS (Aurora), SLURM, Open MPI and Intel MPI; masks that hide devices; our option.
"""

import contextlib
from collections.abc import Mapping, Sequence

from xfuser_cocodiff.engine.topology import launcher
from xfuser_cocodiff.xdit.settings import parsers
from xfuser_cocodiff.xdit.settings.options import SHARE_FIELD, SHARE_VARIABLE

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
    is_declared = any(argument.replace("-", "_") == f"__{SHARE_FIELD}" for argument in arguments)
    with contextlib.suppress(ValueError):  # the config will be an error, on every rank
        is_declared |= parsers.boolean(environment.get(SHARE_VARIABLE) or parsers.OFF)
    # A rank that sees one device of several probably has it to itself.
    is_masked = any(environment.get(name) for name in _DEVICE_MASKS) and devices == 1
    return is_declared or (not is_masked and devices > 0 and (launcher.ranks_per_node(environment) or 1) > devices)
