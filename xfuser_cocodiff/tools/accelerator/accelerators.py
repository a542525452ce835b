"""Provides the accelerators of known machines: rates that real kernels reach, and host time of their calls.

They are the table in `accelerators.json`, where every figure has a published source or is marked as assumed. Rates are
those while all ranks of a node compute.
"""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

_WIDE_HEAD = 128
"""Head dim from which attention reaches its full rate."""


@dataclass(frozen=True)
class Accelerator:
    """Device of one rank: a GPU, or one tile of a GPU."""

    name: str
    matmul_flops: float
    """FLOP/s that bf16 linear layers of a diffusion transformer reach."""
    attention_flops: float
    """FLOP/s that the fastest bf16 attention kernel reaches at head dim 128."""
    narrow_attention_flops: float
    """FLOP/s that it reaches at head dim 64."""
    bytes_per_second: float
    """Bytes that pointwise kernels read and write per second."""
    shortest_kernel_seconds: float
    """Duration of the smallest kernel on the device, with the gap to the next kernel of its stream."""
    launch_seconds: float
    """Host time of one eager operator: Python, PyTorch's dispatcher and the launch."""
    collective_host_seconds: float
    """Host time to start one collective from Python."""
    memory_gib: float | None = None
    """Nominal memory of the device; None if it is unknown."""

    def with_flops(self, flops: float) -> "Accelerator":
        """Return the accelerator with another rate of linear layers and attention, in FLOP/s."""
        return replace(self, matmul_flops=flops, attention_flops=flops, narrow_attention_flops=flops)

    @property
    def copied_bytes_per_second(self) -> float:
        """Bytes copied per second, each of which is read and written."""
        return self.bytes_per_second / 2

    def kernel_seconds(
        self, moved_bytes: float, matmul_flops: float = 0.0, attention_flops: float = 0.0, head_dim: int = _WIDE_HEAD
    ) -> float:
        """Return the time of one kernel on the device: the longest of its FLOPs, its bytes and the shortest kernel.

        Args:
            moved_bytes: bytes that the kernel reads and writes.
            matmul_flops: FLOPs in matrix products of linear layers.
            attention_flops: FLOPs in attention.
            head_dim: head dim of the attention.
        """
        attention_rate = self.attention_flops if head_dim >= _WIDE_HEAD else self.narrow_attention_flops
        busy = matmul_flops / self.matmul_flops + attention_flops / attention_rate
        return max(busy, moved_bytes / self.bytes_per_second, self.shortest_kernel_seconds)


ACCELERATORS = {
    name: Accelerator(name, **{field: value for field, value in values.items() if field != "sources"})
    for name, values in json.loads(Path(__file__).with_suffix(".json").read_text()).items()
}
"""Accelerators by name."""
UNKNOWN = replace(ACCELERATORS["h100-sxm"], name="unknown", bytes_per_second=math.inf, memory_gib=None).with_flops(
    math.inf
)
"""Device whose rates are to be replaced, with the overheads of CUDA."""
