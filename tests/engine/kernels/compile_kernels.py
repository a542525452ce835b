"""Compile Triton's kernels for a GPU that need not be present, such as sm_90.

    python tests/engine/kernels/compile_kernels.py 90

Runs in its own process, since tests run the kernels by the interpreter. Prints the results as JSON: the products of
each kernel, its number of fused multiply-adds, and the widths of its memory accesses.
"""

import json
import re
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from xfuser_cocodiff.engine.kernels import triton_kernels

POINTERS = {"positions": "*i32", **dict.fromkeys(("scale_table", "sums", "scores", "energies"), "*fp32")}
POINTERS |= {"gains": "*u8"}
FLOATS = "reference_norm", "weight"
VALUES = "values", "reference", "previous", "new_reference", "target", "base"
DIVISIBLE = re.compile(r"stride_(?!sample)\w+|scales_offset")
"""Arguments that are multiples of 16 at real sizes; Triton specializes kernels for these, as for aligned pointers."""
NO_BASE = dict.fromkeys(("base", "weight", *(f"stride_base_{dim}" for dim in ("link", "group", "head", "token"))))
"""Arguments of kernels without a base, which Triton compiles as constants."""
CODING = {"dim": 128, "row_tokens": 1, "block_rows": 32, "predicts": True}


def coding(bits: float | None, selects: bool) -> dict[str, dict]:
    """Return the constants that a codec compiles the encode and decode kernels with."""
    grid = triton_kernels._grid(bits)
    byte_columns = triton.next_power_of_2(grid.per_byte)
    block = triton.next_power_of_2(triton.cdiv(CODING["dim"], grid.per_byte)) * byte_columns
    constants = {"levels": grid.levels, "per_byte": grid.per_byte, "level_width": grid.width}
    constants |= {"byte_columns": byte_columns, "block": block, "has_prediction": bits is not None or selects}
    constants |= {"selects_tokens": selects, "sends_gain": selects, **CODING}
    return {"encode": {**constants, "by_maximum": grid.by_maximum}, "decode": constants}


def compiled(
    kernel: triton.JITFunction, dtype: str, constants: dict, capability: int
) -> triton.compiler.CompiledKernel:
    """Compile a kernel for values of a type."""
    types = {name: "i32" for name in kernel.arg_names} | POINTERS
    types["payload"] = "*u8" if constants.get("levels") else f"*{dtype}"
    types |= dict.fromkeys(FLOATS, "fp32") | dict.fromkeys(VALUES, f"*{dtype}") | dict.fromkeys(constants, "constexpr")
    signature = {name: types[name] for name in kernel.arg_names}
    constexprs = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    divisible = [
        index
        for index, name in enumerate(kernel.arg_names)
        if types[name].startswith("*") or (DIVISIBLE.fullmatch(name) and types[name] != "constexpr")
    ]
    attributes = {(index,): [["tt.divisibility", 16]] for index in divisible}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})


def main() -> None:
    capability, found = int(sys.argv[1]), []
    for dtype in ("bf16", "fp32"):
        scoring = {"dim": 128, "block_dim": 128, "block_tokens": 32, "predicts": True}
        kernels = [
            (triton_kernels._scores_kernel, scoring),
            (triton_kernels._scores_kernel, NO_BASE | scoring),
            (triton_kernels._sums_kernel, {"predicts": True, "block": 1024}),
        ]
        for bits, selects, base in (
            *((2, True, NO_BASE), (2, True, {}), (8, False, NO_BASE), (8, False, {}), (1.6, False, NO_BASE)),
            *((2.7, True, NO_BASE), (None, True, NO_BASE), (None, False, NO_BASE)),
        ):
            how = coding(bits, selects)
            kernels.append((triton_kernels._encode_kernel, base | how["encode"]))
            kernels.append((triton_kernels._decode_kernel, base | how["decode"]))
        for kernel, constants in kernels:
            asm = compiled(kernel, dtype, constants, capability).asm
            widths = sorted(set(re.findall(r"(?:ld|st)\.global\.(\w+(?:\.\w+)?)", asm["ptx"])))
            has_base = "base" in kernel.arg_names and "base" not in constants
            result = {"kernel": kernel.__name__, "type": dtype, "base": has_base, "products": sorted(asm)}
            result["has_gaps"] = constants.get("per_byte", 1) != constants.get("byte_columns", 1)
            found.append({**result, "fused": asm["ptx"].count("fma."), "widths": widths})
    print(json.dumps(found))


if __name__ == "__main__":
    main()
