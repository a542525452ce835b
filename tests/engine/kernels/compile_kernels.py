"""Compile the kernels of messages for a GPU that need not be present, such as sm_90.

    python -m tests.engine.kernels.compile_kernels 90

Runs in its own process, since tests run the kernels by the interpreter. Kernels are compiled for the arguments that the
Triton backend would launch them with. Prints for each kernel as JSON: what is encoded, the number of fused
multiply-adds, the widths of memory accesses, registers and stack of a thread, shared memory, the share of the
multiprocessor's warps that can be resident, and the instructions of the longest loop per value of a thread.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from tests.engine.kernels.case import Case
from xfuser_cocodiff.engine.compression.codec import Codec
from xfuser_cocodiff.engine.kernels import triton_kernels
from xfuser_cocodiff.engine.kernels.rows import GAIN_BYTES, MessagePart

TOKENS, HEAD_DIM = 288, 128
KERNELS = "scores_kernel", "order_kernel", "encode_kernel", "decode_kernel"
REGISTERS, MAX_WARPS, MAX_BLOCKS, SHARED_BYTES = 2**16, 64, 32, 164 * 1024
"""Limits of a multiprocessor of A100, H100 and B200; the latter two have more shared memory."""
THREAD_BYTES = 16
"""Bytes of values that a thread has of a tile."""
CODED = (
    *(((bits,), False, False) for bits in (1, 1.6, 2, 2.7, 4, 8, None)),
    *(((1.6,), True, False), ((2.7,), False, True), ((8,), False, True), ((1.6, 2, 1.6), True, True)),
)
"""Messages: bits of each tensor, whether tokens are selected, and whether a base is subtracted."""


class Compiler:
    """Context in which kernels are compiled for a GPU, and not launched.

    Args:
        capability: compute capability, such as 90.
    """

    def __init__(self, capability: int) -> None:
        target = GPUTarget("cuda", capability, 32)
        current = {"get_current_target": target, "get_current_device": 0, "get_current_stream": 0}
        driver.set_active(SimpleNamespace(**{name: lambda *_, each=each: each for name, each in current.items()}))
        self.compiled: list[triton.compiler.CompiledKernel] = []
        for name in KERNELS:
            setattr(triton_kernels, name, self._compiling(getattr(triton_kernels, name)))

    def _compiling(self, kernel: triton.JITFunction) -> Any:
        """Return a kernel that compiles when it is launched."""

        def launcher(grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *values, **options: self.compiled.append(kernel.warmup(*values, grid=grid, **options))

        compiling = MagicMock()
        compiling.__getitem__.side_effect = launcher
        return compiling

    def run(self, dtype: torch.dtype, bits: tuple[float | None, ...], selects: bool, based: bool) -> Iterator[dict]:
        """Yield what is known of the kernels of a message."""
        case, known = Case(dtype, range(1), dim=HEAD_DIM, tokens=TOKENS), any(bits) or selects
        active, prediction = case.active(TOKENS // 2 if selects else None), case.prediction(0.5) if known else None
        if prediction:  # as in all runs on accelerators
            links, _, heads, _, dim = case.reference.shape
            prediction = prediction._replace(channel_scales=torch.ones(links, heads, dim))
        base = case.base(1.0) if based else None
        codecs = [Codec(each, 0.5 if selects else 1.0) for each in bits]
        sizes = [codec.payload_bytes(case.reference.shape, dtype) + GAIN_BYTES * known for codec in codecs]
        payloads = [torch.empty(3, -(-size // 64) * 64, dtype=torch.uint8)[:, :size] for size in sizes]
        parts = [
            MessagePart(case.values, prediction, each, active, payload, case.local_slots, known, base)
            for each, payload in zip(bits, payloads, strict=True)
        ]
        self.compiled.clear()
        triton_kernels.encode_all(parts)
        triton_kernels.decode_all([part._replace(values=case.target) for part in parts])
        if prediction:
            triton_kernels.scores(case.values, prediction, case.local_slots, base)
        for kernel in self.compiled:
            ptx = kernel.asm["ptx"]
            assert "cubin" in kernel.asm
            widths = sorted(set(re.findall(r"(?:ld|st)\.global\.(?:cg\.)?(\w+(?:\.\w+)?)", ptx)))
            found = {"kernel": kernel.metadata.name, "type": str(dtype), "bits": bits, "selects": selects}
            instructions = loop_instructions(kernel) / (THREAD_BYTES / dtype.itemsize)
            found |= {"base": based, "fused": ptx.count("fma."), "widths": widths, "instructions": instructions}
            yield found | resources(kernel)


def dump(kernel: triton.compiler.CompiledKernel, what: str) -> str:
    """Return what NVIDIA's `cuobjdump` prints of a kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(Path(nvidia.__file__).parent / "bin" / "cuobjdump"), what, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def loop_instructions(kernel: triton.compiler.CompiledKernel) -> int:
    """Return the number of instructions in the longest loop of a kernel: up to a branch backward; 0 without a loop."""
    lines = re.findall(r"/\*([0-9a-f]{4,8})\*/\s+([@A-Z][^;]*);", dump(kernel, "-sass"))
    addresses = [int(address, 16) for address, _ in lines]
    branches = [re.search(r"\bBRA\b.*0x([0-9a-f]+)", line) for _, line in lines]
    jumps = [(int(branch.group(1), 16), address) for address, branch in zip(addresses, branches, strict=True) if branch]
    loops = [(target, address) for target, address in jumps if target < address]
    return max((sum(first <= address <= last for address in addresses) for first, last in loops), default=0)


def resources(kernel: triton.compiler.CompiledKernel) -> dict[str, float]:
    """Return registers and bytes of stack of a thread, to which registers are spilled, and the occupancy."""
    usage = dump(kernel, "-res-usage")
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage).group(1)) for name in ("REG", "STACK"))
    warps, per_warp = kernel.metadata.num_warps, -(-registers * 32 // 256) * 256
    blocks = min(MAX_BLOCKS, REGISTERS // (per_warp * warps), SHARED_BYTES // (1024 + kernel.metadata.shared))
    return {"registers": registers, "stack": stack, "occupancy": min(1.0, blocks * warps / MAX_WARPS)}


def main() -> None:
    compiler = Compiler(int(sys.argv[1]))
    messages = [(torch.bfloat16, *message) for message in CODED] + [(torch.float32, *CODED[0])]
    print(json.dumps([row for message in messages for row in compiler.run(*message)]))


if __name__ == "__main__":
    main()
