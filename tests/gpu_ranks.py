"""Ranks that share one GPU, for tests marked `gpu`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import ranks
from xfuser_cocodiff.lab.one_gpu import mps, nccl_library, rank_launch

_BUILD_SECONDS = 900.0


@dataclass
class GpuRanks:
    """Starts ranks that share the GPU."""

    backend: str
    """Backend of their process groups; gloo proves less."""
    env: dict[str, str]
    """Environment variables of every rank."""

    @property
    def is_staged(self) -> bool:
        """Whether messages go through host memory."""
        return self.backend == rank_launch.GLOO

    def run(self, case: Callable, world_size: int, *args: Any) -> list[Any]:
        """Call ``case(rank, *args)`` on `world_size` ranks and return their results."""
        return ranks.run(case, world_size, *args, env=self.env, spawn=True, backend=self.backend)


@contextmanager
def shared_gpu(folder: Path) -> Iterator[GpuRanks]:
    """Build NCCL if a source archive is given, and yield ranks with the best transport."""
    nccl_library.start_build(folder)
    nccl_library.wait_for_build(folder, _BUILD_SECONDS)
    transport = rank_launch.select(folder)
    with mps.service(transport.uses_mps) as clients:
        yield GpuRanks(transport.backend, {**transport.environment, **clients})
