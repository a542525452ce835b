"""Compile Triton's kernels for a GPU that need not be present, such as sm_90.

    python tests/engine/kernels/compile_kernels.py 90

A process of its own, since tests run the kernels by the interpreter. Prints the products as JSON: which there are, how
many products and sums of each kernel are fused into one rounding, and how wide its accesses to memory are.
"""

import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from xfuser_cocodiff.engine.kernels import triton_kernels

POINTERS = {"numbers": "*i32", **dict.fromkeys(("table", "sums", "found", "totals"), "*fp32")}
POINTERS |= dict.fromkeys(("shares", "again"), "*u8")
FLOATS = ("root",)
VALUES = ("values", "held", "before", "now", "target")
DIVISIBLE = re.compile(r"stride_\w+|scales_at")
"""What is a multiple of 16 at real sizes, which Triton asks at every launch, as for pointers."""
CODING = {"dim": 128, "together": 1, "block_rows": 32, "predicts": True}


def coding(bits: float | None, selects: bool) -> dict[str, dict]:
    """Of what a codec compiles the kernels that encode and decode with."""
    grid = triton_kernels._grid(bits)
    room = triton.next_power_of_2(grid.per_byte)
    block = triton.next_power_of_2(triton.cdiv(CODING["dim"], grid.per_byte)) * room
    known = {"levels": grid.levels, "per": grid.per_byte, "width_of": grid.width, "room": room, "block": block}
    known |= {"is_known": bits is not None or selects, "selects": selects, "tells": selects, **CODING}
    return {"encode": {**known, "by_maximum": grid.by_maximum}, "decode": known}


def compiled(
    kernel: triton.JITFunction, dtype: str, constants: dict, capability: int
) -> triton.compiler.CompiledKernel:
    """A kernel for values of a type."""
    types = {name: "i32" for name in kernel.arg_names} | POINTERS
    types["payload"] = "*u8" if constants.get("levels") else f"*{dtype}"
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
            (triton_kernels._scores_kernel, {"dim": 128, "block_dim": 128, "block_tokens": 32, "predicts": True}),
            (triton_kernels._sums_kernel, {"predicts": True, "block": 1024}),
        ]
        for bits, selects in ((2, True), (8, False), (1.6, False), (2.7, True), (None, True), (None, False)):
            how = coding(bits, selects)
            kernels += [(triton_kernels._encode_kernel, how["encode"]), (triton_kernels._decode_kernel, how["decode"])]
        for kernel, constants in kernels:
            asm = compiled(kernel, dtype, constants, capability).asm
            widths = sorted(set(re.findall(r"(?:ld|st)\.global\.(\w+(?:\.\w+)?)", asm["ptx"])))
            known = {"kernel": kernel.__name__, "type": dtype, "products": sorted(asm)}
            known["has_gaps"] = constants.get("per", 1) != constants.get("room", 1)
            found.append({**known, "fused": asm["ptx"].count("fma."), "widths": widths})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
