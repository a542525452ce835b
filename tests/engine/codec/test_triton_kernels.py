"""Triton's kernels compile for a GPU, and one launch processes all tensors of a message."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.codec.case import (
    DEVICE,
    EXTRAPOLATED,
    KEYFRAME,
    REFERENCE,
    SECOND,
    Case,
    same_reference,
)
from tests.engine.codec.launches import KERNELS
from xfuser_cocodiff.engine.codec.rows import MessagePart


def output_of(module: str, arguments: Sequence[str], cache: Path) -> Any:
    """Return what a module of this package prints as JSON, where Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-m", f"tests.engine.codec.{module}", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow  # no quick test counts compilations
@pytest.mark.parametrize("mode", ["balanced", "fast"])
def test_self_check_compiles_what_runs_launch(mode: str, tmp_path: Path) -> None:
    """No run of any size waits for a compiler, whatever its messages."""
    found = output_of("count_compilations", [mode], tmp_path)
    assert 0 < found["self-check"] <= 36
    assert not any(found["runs"].values()), found


def checked(capability: int, what: Sequence[str], cache: Path) -> dict[str, Any]:
    """Check what the compiler makes of kernels for a GPU, and return what is known of them.

    Encoder and decoder must round identically, so no multiply and add may be fused. Only divisions, which the encoder
    alone computes, contain fused operations. Memory is accessed 16 bytes at a time. At least half of the warps
    of a multiprocessor are resident. The longest loops have as many instructions per value as were measured, at most.
    """
    found = output_of("compile_kernels", [str(capability), *what], cache)
    for row in found["kernels"]:
        name = row["kernel"].removesuffix("_kernel")
        assert row["fused"] == 0 or name == "encode", row
        assert row["stack"] == 0, row
        assert row["occupancy"] >= 0.5 and row["registers"] <= 64, row
        assert "v4.b32" in row["widths"], row
        if "instructions" in row:
            assert 0 < row["instructions"] <= {"encode": 102, "decode": 64}[name], row
    assert {row["kernel"] for row in found["kernels"]} == set(KERNELS)
    return found


def test_a_message_of_three_tensors_compiles_for_a_gpu(tmp_path: Path) -> None:
    """A later launch does not hash the constants of each tensor, for which the host took 10 us."""
    assert checked(90, ["message"], tmp_path)["hashed"] == 0


@pytest.mark.slow  # .ci/run repeats it with older Tritons, for sm_90
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_of_modes_compile_for_a_gpu(capability: int, tmp_path: Path) -> None:
    """Compile what the self-checks launch, which is what runs launch."""
    checked(capability, ["balanced", "fast"], tmp_path)


def parts_of(case: Case) -> list[MessagePart]:
    """Return tensors of a message, each encoded in another way."""
    values, base = case.plus_base(), case.base
    return [
        case.part(case.prediction(EXTRAPOLATED), 1.6),
        case.part(case.prediction(REFERENCE), 2, values=values, base=base),
        case.part(case.prediction(KEYFRAME), 8),
        case.part(case.prediction(EXTRAPOLATED), 5.3, values=values, base=base),
    ]


def test_one_launch_encodes_and_decodes_all_tensors_of_a_message(triton_kernels) -> None:
    """Equal what a launch for each tensor gives, energies and gains included, in any order of launches."""
    case = Case(torch.bfloat16, SECOND)
    expected = [case.encoded(triton_kernels, part) for part in parts_of(case)]
    assert sum(each.gains is not None for each in expected) == 2
    for together in (parts_of(case) for _ in range(2)):
        energies = torch.zeros(len(together), 2, device=DEVICE)
        triton_kernels.encode(together, energies)
        for part, of_part, (other, of_other, gains) in zip(together, energies, expected, strict=True):
            assert torch.equal(case.remote(part.payload), case.remote(other.payload))
            assert same_reference(part.new_reference, other.new_reference)
            assert torch.equal(of_part, of_other)
            assert gains is None or torch.equal(part.prediction.gains, gains)
    received = [
        part._replace(values=torch.zeros_like(case.values), new_reference=case.memory()) for part, *_ in expected
    ]
    triton_kernels.decode(received)
    for part, (sent, *_) in zip(received, expected, strict=True):
        assert same_reference(part.new_reference, sent.new_reference) and part.values.any()
