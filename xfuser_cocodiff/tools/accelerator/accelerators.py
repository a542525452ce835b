"""Provides the accelerators of known machines: rates that real kernels reach, and host time of their calls.

Every figure has a published source, or is marked "assumed". Rates are those while all ranks of a node compute.
"""

import math
from dataclasses import dataclass, replace

from xfuser_cocodiff.engine.topology import devices

ONECCL_SECONDS = devices.capabilities("xpu").collective_host_seconds
"""Host time of a oneCCL collective of any size; the host takes part until it starts."""
HOST_COPY_BYTES_PER_SECOND = 25e9
"""Bytes copied per second between host and device; assumed: 0.8 of PCI Express 4.0 with 16 lanes."""
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
    def call_seconds(self) -> float:
        """Host time of a call that launches no kernel, such as a view or an event; assumed 1/8 of an operator's."""
        return self.launch_seconds / 8

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


_CUDA_LAUNCH = 8e-6
"""Assumed: 2 us of a CUDA launch and 6 us of Python and PyTorch's dispatcher. More is possible: 28 eager steps of
FLUX.1-dev on four H100 took 4.24 s in an older xDiT, whatever the split (docs/performance/flux.md), which is at most
25 us per operator."""
_CUDA_SHORTEST_KERNEL = 3e-6
"""Constant latency that ai-dynamo/aiconfigurator adds to memory-bound kernels (its systems/*.yaml)."""
_NCCL_HOST = 30e-6
"""Assumed: the time of four operators for c10d's checks, work object and events, and NCCL's enqueue and launch."""

MAX_1550_TILE = Accelerator(
    "max-1550-tile",
    # BF16 GEMM on all 12 tiles of a node: 2487 TFLOP/s, 207 per tile, at the best size (ALCF, "Node Performance
    # Overview", January 2026; one tile alone reaches 256). Assumed: layers reach 0.85 of it at their sizes.
    matmul_flops=0.85 * 2487e12 / 12,
    # 100 to 111 TFLOP/s without a mask at head dim 128, 104 to 114 at 64 (SYCL-TLA, which PyTorch's kernel uses, in
    # intel/intel-xpu-backend-for-triton#5771). It names no device; assumed: one tile, on which it is measured in CI.
    attention_flops=106e12,
    narrow_attention_flops=109e12,
    # Triad: 1 TB/s on each of 12 tiles (ALCF, as above). Assumed: PyTorch's pointwise kernels reach 0.8 of it.
    bytes_per_second=0.8e12,
    shortest_kernel_seconds=3e-6,  # assumed, as on CUDA
    launch_seconds=10e-6,  # assumed: a launch through SYCL and Level Zero costs 2 us more than one of CUDA
    collective_host_seconds=ONECCL_SECONDS,
    memory_gib=64,
)

H100 = Accelerator(
    "h100-sxm",
    # Best of all sizes: 794.5 TFLOP/s (stas00/ml-engineering, "Maximum Achievable Matmul FLOPS"). Assumed: layers reach
    # 0.82 of it, because of their sizes and the power limit in long runs.
    matmul_flops=0.82 * 794.5e12,
    # FlashAttention-3 without a mask: 590 TFLOP/s at 4k tokens and 621 at 16k (pytorch/benchmark#2391).
    attention_flops=600e12,
    narrow_attention_flops=480e12,  # 476 at 4k tokens, 497 at 16k (the FlashAttention-3 paper, head dim 64)
    # 0.65 of 3.35 TB/s (NVIDIA, "H100"), fitted: 28 eager steps of FLUX.1-dev at 1024 px take 6.7 s on one H100 (xDiT,
    # docs/performance/flux.md), with FlashAttention-2 and an RMSNorm of seven kernels.
    bytes_per_second=0.65 * 3.35e12,
    shortest_kernel_seconds=_CUDA_SHORTEST_KERNEL,
    launch_seconds=_CUDA_LAUNCH,
    collective_host_seconds=_NCCL_HOST,
    memory_gib=80,
)

A100 = Accelerator(
    "a100-80gb",
    # Best of all sizes: 271.2 TFLOP/s (stas00/ml-engineering, as above). Assumed: layers reach 0.9 of it.
    matmul_flops=0.9 * 271.2e12,
    # FlashAttention-2 reaches up to 73 % of the peak of 312 TFLOP/s (its paper). Assumed: 0.9 of that at head dim 64,
    # as the same kernel on an H100 (324 of 370 TFLOP/s, the FlashAttention-3 paper).
    attention_flops=0.73 * 312e12,
    narrow_attention_flops=0.9 * 0.73 * 312e12,
    # 0.55 of 2.04 TB/s (NVIDIA, "A100 80GB"), fitted in the same way to 14.3 s (varadrane1707/BenchmarkFlux).
    bytes_per_second=0.55 * 2.04e12,
    shortest_kernel_seconds=_CUDA_SHORTEST_KERNEL,
    launch_seconds=_CUDA_LAUNCH,
    collective_host_seconds=_NCCL_HOST,
    memory_gib=80,
)

L20 = Accelerator(
    "l20",
    # cuBLAS reaches 105 to 115 TFLOP/s in fp16 (DefTruth/CUDA-Learn-Notes, hgemm).
    matmul_flops=110e12,
    # 102 to 104 TFLOP/s with fp32 accumulation (FFPA at head dims 320 to 576, Dao-AILab/flash-attention#1483). Assumed:
    # the same at 128, and 0.9 of it at 64, as on an A100.
    attention_flops=102e12,
    narrow_attention_flops=0.9 * 102e12,
    # 0.85 of 864 GB/s (NVIDIA, "L20"), fitted in the same way to 24.9 s (xlite-dev/flux-faster). Its cache of 96 MB
    # holds many tensors.
    bytes_per_second=0.85 * 864e9,
    shortest_kernel_seconds=_CUDA_SHORTEST_KERNEL,
    launch_seconds=_CUDA_LAUNCH,
    collective_host_seconds=_NCCL_HOST,
    memory_gib=48,
)

ARC_B60 = Accelerator(
    "arc-pro-b60",
    # GEMMs reach up to 97.5 TFLOP/s on the bf16 pipeline, 99 % of its peak (ai-dynamo/aiconfigurator#1418). Assumed:
    # layers reach 0.9 of it.
    matmul_flops=0.9 * 97.5e12,
    # Block-sparse attention in bf16 over 75,000 tokens, 40 heads of 128: 60 to 67 TFLOP/s (intel/auto-round#2145).
    # Assumed: dense attention the same, and head dim 64 too, as on the Max 1550.
    attention_flops=65e12,
    narrow_attention_flops=65e12,
    # RMSNorm, SiLU and RoPE kernels reach 220 of 456 GB/s (ai-dynamo/aiconfigurator, systems/b60.yaml).
    bytes_per_second=220e9,
    shortest_kernel_seconds=3e-6,  # ai-dynamo/aiconfigurator, as above
    launch_seconds=10e-6,  # assumed, as on the Max 1550
    collective_host_seconds=ONECCL_SECONDS,
    memory_gib=24,
)

UNKNOWN = Accelerator(
    "unknown", math.inf, math.inf, math.inf, math.inf, _CUDA_SHORTEST_KERNEL, _CUDA_LAUNCH, _NCCL_HOST
)
"""Device whose rates are to be replaced, with the overheads of CUDA."""
ACCELERATORS = {each.name: each for each in (MAX_1550_TILE, H100, A100, L20, ARC_B60)}
