"""Process groups of xDiT on the ranks that a launcher started, without a pipeline."""

import os
from datetime import timedelta

import torch.distributed as dist

from xfuser_cocodiff.xdit.integration import activation
from xfuser_cocodiff.xdit.patching import host
from xfuser_cocodiff.xdit.platforms import local_device


def start(timeout: float | None = None, ring: int = 1) -> dist.ProcessGroup:
    """Initialize xDiT with all ranks that a launcher started sharing a sequence, and return their group.

    Args:
        timeout: longest time of a collective in seconds; PyTorch's default when not given.
        ring: ring degree; Ulysses groups join neighboring ranks.

    Raises:
        ValueError: no launcher started this process.
    """
    if missing := [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise ValueError(
            f"{', '.join(missing)} not set: this command runs on every rank, for example under torchrun --no-python"
        )
    from xfuser.core.distributed import init_distributed_environment, initialize_model_parallel

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    activation.activate()  # failure detection also while stock runs
    init_distributed_environment(rank=rank, world_size=world, local_rank=local_device.local_rank(os.environ))
    initialize_model_parallel(sequence_parallel_degree=world, ulysses_degree=world // ring, ring_degree=ring)
    if timeout:
        for group in (dist.group.WORLD, *process_groups()):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout), group)
    return dist.group.WORLD


def process_groups() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the Ulysses group and the ring of this rank."""
    groups = host.process_groups()
    return groups.ULYSSES_PG, groups.RING_PG
