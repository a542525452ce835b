"""Compiles Triton's kernels for a GPU that need not be there: `python tests/kernels/compile_kernels.py 90` for sm_90.

A process of its own, since tests run the kernels by the interpreter. Prints the products as JSON: which there are, how
many products and sums of each kernel are fused into one rounding, and how wide its accesses to memory are.
"""

import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from xfuser_cocodiff.kernels import fused

POINTERS = {"numbers": "*i32", "table": "*fp32", "sums": "*fp32", "found": "*fp32"}
FLOATS = ("predictor", "step", "root")
VALUES = ("values", "held", "before", "now", "target", "source")
DIVISIBLE = re.compile(r"stride_\w+|from\d|to\d|columns|scales_at")
"""What is a multiple of 16 at real sizes, which Triton asks at every launch, as for pointers."""
CODING = {"dim": 128, "block_dim": 128, "block_rows": 32, "predicts": True}


def compiled(
    kernel: triton.JITFunction, dtype: str, constants: dict, capability: int
) -> triton.compiler.CompiledKernel:
    """A kernel for values of a type."""
    types = {name: "i32" for name in kernel.arg_names} | POINTERS
    types["payload"] = "*u8" if constants.get("bits") else f"*{dtype}"
    types |= dict.fromkeys(FLOATS, "fp32") | dict.fromkeys(VALUES, f"*{dtype}") | dict.fromkeys(constants, "constexpr")
    signature = {name: types[name] for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    divisible = [
        place for place, name in enumerate(kernel.arg_names) if types[name].startswith("*") or DIVISIBLE.fullmatch(name)
    ]
    facts = {(place,): [["tt.divisibility", 16]] for place in divisible}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places, attrs=facts)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})


def main() -> None:
    capability, found = int(sys.argv[1]), []
    for dtype in ("bf16", "fp32"):
        kernels = [
            (fused._scores_kernel, {"dim": 128, "block_dim": 128, "block_tokens": 32, "predicts": True}),
            (fused._move_kernel, {"block_rows": 32, "block_columns": 128}),
        ]
        for bits, selects in ((2, True), (8, False), (0, True), (0, False)):
            coding = {**CODING, "bits": bits, "selects": selects}
            kernels += [(fused._encode_kernel, coding), (fused._decode_kernel, coding)]
        for kernel, constants in kernels:
            asm = compiled(kernel, dtype, constants, capability).asm
            widths = sorted(set(re.findall(r"(?:ld|st)\.global\.(\w+(?:\.\w+)?)", asm["ptx"])))
            known = {"kernel": kernel.__name__, "type": dtype, "products": sorted(asm)}
            found.append({**known, "fused": asm["ptx"].count("fma."), "widths": widths})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
