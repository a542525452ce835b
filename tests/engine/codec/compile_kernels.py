"""Compile the kernels of messages for a GPU that need not be present, such as sm_90.

    python -m tests.engine.codec.compile_kernels 90 balanced fast  # what the self-checks of these modes launch
    python -m tests.engine.codec.compile_kernels 90 message        # one message of three tensors

Runs in its own process, since tests run the kernels by the interpreter. Kernels are compiled for the arguments that the
Triton backend would launch them with, by the Triton that PYTHONPATH has. Prints for each kernel as JSON: the number of
fused multiply-adds, the widths of memory accesses, registers and stack of a thread, and the share of the
multiprocessor's warps that can be resident; for one message also the instructions of the longest loop per value of a
thread.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.backends import nvidia

from tests.engine.codec.case import EXTRAPOLATED, Case
from tests.engine.codec.launches import KERNELS, as_on_accelerators, self_check, set_target
from xfuser_cocodiff.engine.codec import triton_kernels

TOKENS, HEAD_DIM = 288, 128
REGISTERS, MAX_WARPS, MAX_BLOCKS, SHARED_BYTES = 2**16, 64, 32, 164 * 1024
"""Limits of a multiprocessor of A100, H100 and B200; the latter two have more shared memory."""
THREAD_VALUES = 8
"""Values that a thread has of a tile, bfloat16."""


class Compiler:
    """Context in which kernels are compiled for a GPU, and not launched.

    Args:
        capability: compute capability, such as 90.
    """

    def __init__(self, capability: int) -> None:
        set_target(capability)
        self.compiled: dict[int, triton.compiler.CompiledKernel] = {}
        for name in KERNELS:
            setattr(triton_kernels, name, self._compiling(getattr(triton_kernels, name)))

    def _compiling(self, kernel: triton.JITFunction) -> Any:
        """Return a kernel that compiles when it is launched."""

        def launcher(grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *values, **options: self._add(kernel.warmup(*values, grid=grid, **options))

        compiling = mock.MagicMock()
        compiling.__getitem__.side_effect = launcher
        return compiling

    def _add(self, kernel: triton.compiler.CompiledKernel) -> None:
        """Add a kernel to the compiled ones, unless it is there."""
        self.compiled[id(kernel)] = kernel

    def run_modes(self, modes: Sequence[str]) -> Iterator[dict]:
        """Yield what is known of the kernels of modes."""
        with as_on_accelerators():
            for mode in modes:
                self_check(mode)
        yield from map(properties, self.compiled.values())

    def run_message(self) -> Iterator[dict]:
        """Yield what is known of the kernels of a message."""
        case, bits, number = Case(torch.bfloat16, range(1), dim=HEAD_DIM, tokens=TOKENS), 2, 3
        part = case.part(case.prediction(EXTRAPOLATED), bits, base=case.base)
        size = part.payload.shape[1]
        parts = [
            part._replace(payload=torch.empty(3, -(-size // 64) * 64, dtype=torch.uint8)[:, :size])
            for _ in range(number)
        ]
        triton_kernels.encode(parts, torch.empty(number, 2))
        triton_kernels.decode(parts)
        for kernel in self.compiled.values():
            yield {"instructions": loop_instructions(kernel) / THREAD_VALUES} | properties(kernel)


def properties(kernel: triton.compiler.CompiledKernel) -> dict[str, Any]:
    """Return the name of a kernel, its fused operations, its widths of memory accesses, and what it occupies."""
    ptx = kernel.asm["ptx"]
    assert "cubin" in kernel.asm
    widths = sorted(set(re.findall(r"(?:ld|st)\.global\.(?:cg\.)?(\w+(?:\.\w+)?)", ptx)))
    return {"kernel": kernel.metadata.name, "fused": fused_operations(ptx), "widths": widths} | resources(kernel)


def fused_operations(ptx: str) -> int:
    """Return the number of multiply-adds in a kernel.

    Before sm_90, bfloat16 values are added by a multiply-add with a factor of 1 or -1, and multiplied by one that adds
    -0, which round as the single operations do.
    """
    single = {"0x3F80", "0xBF80", "0x8000", str(0x3F803F80), str(0xBF80BF80 - 2**32), str(0x80008000 - 2**32)}
    constants = {name for name, value in re.findall(r"mov\.b(?:16|32)\s+(%\w+), (\S+);", ptx) if value in single}
    fused = re.findall(r"fma\.rn\.(\w+)\S*\s+%\w+, (%\w+), (%\w+), (%\w+);", ptx)
    assert len(fused) == ptx.count("fma.")
    return sum(not (kind.startswith("bf16") and constants & set(operands)) for kind, *operands in fused)


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


def hashed_constants(launch: Callable[[], object]) -> int:
    """Return the number of constants that launches hash one by one, in Python."""
    count, hash_of = 0, tl.constexpr.__hash__

    def counted(constant: tl.constexpr) -> int:
        nonlocal count
        count += 1
        return hash_of(constant)

    with mock.patch.object(tl.constexpr, "__hash__", counted):
        launch()
    return count


def main() -> None:
    compiler, what = Compiler(int(sys.argv[1])), sys.argv[2:]
    if what == ["message"]:
        found = {"kernels": list(compiler.run_message())}
        found["hashed"] = hashed_constants(lambda: list(compiler.run_message()))
    else:
        found = {"kernels": list(compiler.run_modes(what))}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
