"""Triton's kernels compile for a GPU, and address tensors of more than 2**31 values."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.coded_layers import layer_codecs
from tests.engine.codec.case import (
    DEVICE,
    EXTRAPOLATED,
    HAS_GPU,
    KEYFRAME,
    REFERENCE,
    SECOND,
    Case,
    Encoded,
    same_reference,
)
from tests.engine.codec.launches import KERNELS
from tests.engine.codec.limits import LIMITS, limits_of
from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.codec.codec import Codec
from xfuser_cocodiff.engine.codec.rows import Int8Rows, MessagePart, Prediction, rows_of
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.compression.message import Message
from xfuser_cocodiff.engine.compression.step_errors import StepErrors, TensorError


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


def test_energies_of_a_message_are_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was added before: kernels are compiled for the alignment of their arguments."""
    encode, found = kernels.encode, []
    monkeypatch.setattr(
        kernels, "encode", lambda parts, energies: found.append(energies.data_ptr() % 16) or encode(parts, energies)
    )
    errors, values, keyframe = StepErrors(), torch.randn(2, 1, 1, 4, 16), Codec(8, is_keyframe=True)
    of_layer = layer_codecs(None, dict.fromkeys("qkvo", Codec(2)), {}, errors=errors, keyframe_codec=keyframe)
    for number in range(100):  # more than a chunk of memory
        names = ("qkv", "o", "kv")[number % 3]
        errors.add([TensorError("fp8")] * (number % 4), values.device)
        Message(Label(names), [values] * len(names), of_layer, range(1)).encode()
    assert found == [0] * 100


def checked(capability: int, what: Sequence[str], cache: Path) -> dict[str, Any]:
    """Check what the compiler makes of kernels for a GPU, and return what is known of them.

    Encoder and decoder must round identically, so no multiply and add may be fused. Only divisions, which the encoder
    alone computes, contain fused operations. Memory is accessed 16 bytes at a time. At least half of the warps
    of a multiprocessor are resident.
    """
    found = output_of("compile_kernels", [str(capability), *what], cache)
    limits = limits_of(found["triton"])
    for row in found["kernels"]:
        name = row["kernel"].removesuffix("_kernel")
        assert row["fused"] == 0 or name == "encode", row
        assert row["stack"] <= limits.spilled, row
        assert row["occupancy"] >= 0.5 and row["registers"] <= limits.registers, row
        assert limits.access in row["widths"], row
        if row.get("type") == "torch.bfloat16":
            assert 0 < row["instructions"] <= getattr(limits, f"{name}_instructions"), row
    assert {row["kernel"] for row in found["kernels"]} == set(KERNELS)
    return found


def test_a_triton_has_limits_of_its_own_or_of_the_newest() -> None:
    assert limits_of("3.8.0") == LIMITS["3.8"] != LIMITS["3.9"]
    assert limits_of("3.10.0") == limits_of("4.0.0+git1") == LIMITS["3.9"]


def test_a_message_of_three_tensors_compiles_for_a_gpu(tmp_path: Path) -> None:
    """A later launch does not hash the constants of each tensor, for which the host took 10 us."""
    assert checked(90, ["message"], tmp_path)["hashed"] == 0


@pytest.mark.slow  # a quick test compiles one message
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile_for_a_gpu(capability: int, tmp_path: Path) -> None:
    """Compile to machine code by Triton's compiler and NVIDIA's assembler, which need no GPU."""
    checked(capability, [], tmp_path)


@pytest.mark.slow  # .ci/run repeats it with older Tritons, for sm_90
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_of_modes_compile_for_a_gpu(capability: int, tmp_path: Path) -> None:
    """Compile what the self-checks launch, which is what runs launch."""
    checked(capability, ["balanced", "fast"], tmp_path)


class LastProgram:
    """Runs the last program of a kernel's launch and records the addresses that it reads and writes.

    No memory is accessed.
    """

    def __init__(self, kernel, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime import interpreter

        self._kernel, self.addresses, builder = kernel, {"read": [], "written": []}, interpreter.InterpreterBuilder

        def load(_, pointers, mask, *rest):
            dtype = pointers.get_element_ty()
            self.addresses["read"].append(pointers.data[mask.data])
            return interpreter.TensorHandle(np.zeros(pointers.data.shape, interpreter._get_np_dtype(dtype)), dtype)

        def store(_, pointers, value, mask, *rest):
            self.addresses["written"].append(pointers.data[mask.data])

        def count(_, operation, pointers, *rest):  # the program is not the last one
            dtype = pointers.get_element_ty()
            return interpreter.TensorHandle(np.zeros(pointers.data.shape, interpreter._get_np_dtype(dtype)), dtype)

        monkeypatch.setattr(builder, "create_atomic_rmw", count)
        monkeypatch.setattr(builder, "create_masked_load", load)
        monkeypatch.setattr(builder, "create_masked_store", store)
        monkeypatch.setattr(
            builder, "set_grid_idx", lambda self, *_: setattr(self, "grid_idx", (LastProgram.number, 0, 0))
        )
        monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)

    def __getitem__(self, grid: tuple[int, ...]):
        LastProgram.number = grid[0] - 1
        return self._kernel[(1,)]

    def reaches_end_of(self, tensor: torch.Tensor, access: str) -> bool:
        """Return whether the last value of a tensor was accessed ("read" or "written"), and nothing beyond it."""
        begin, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        offsets = np.concatenate(self.addresses[access]).astype(np.int64) - begin
        inside = offsets[(offsets >= 0) & (offsets < size)]
        return len(inside) > 0 and inside.max() == size - tensor.itemsize


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


def test_an_interrupted_launch_does_not_change_later_ones(triton_kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that has counted and was not followed by the others must not leave its count."""
    case = Case(torch.bfloat16, SECOND, tokens=200)

    def encoded() -> Encoded:
        return case.encoded(triton_kernels, case.part(case.prediction(EXTRAPOLATED), 2))

    expected = encoded()

    class Interrupted:
        def __getitem__(self, grid: tuple[int, ...]):
            def launch(tensors, shapes, tables, sums, energies, counters, **_):
                counters[0] = 1
                raise KeyboardInterrupt

            return launch

    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        context.setattr(triton_kernels, "encode_kernel", Interrupted())
        encoded()
    found = encoded()
    assert same_reference(found.part.new_reference, expected.part.new_reference)
    assert all(map(torch.equal, found[1:], expected[1:]))


@pytest.mark.skipif(HAS_GPU, reason="records addresses by the interpreter, which runs without a GPU only")
@pytest.mark.slow  # no quick test has tensors of this size
def test_kernels_address_more_than_2_to_the_31_values(triton_kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Address tensors of more than 2**31 values, whose memory is reserved but never accessed."""
    shape = (1, 1, 17, 2**20 - 8, 128)
    values, target, base = (torch.empty(shape, dtype=torch.bfloat16) for _ in range(3))
    payload = torch.empty(1, Codec(8).payload_bytes(shape, values.dtype), dtype=torch.uint8)
    assert values.numel() > 2**31 and payload.numel() > 2**31
    last = LastProgram(triton_kernels.encode_kernel, monkeypatch)
    monkeypatch.setattr(triton_kernels, "encode_kernel", last)
    held, new = (Int8Rows.empty(1, *rows_of(shape), values.device) for _ in range(2))
    part = MessagePart(values, Prediction(held), 8, payload, new, base=base)
    triton_kernels.encode([part], torch.empty(1, 2))
    assert all(last.reaches_end_of(tensor, "read") for tensor in (values, base, *held))
    assert all(last.reaches_end_of(tensor, "written") for tensor in (*new, payload))
    last = LastProgram(triton_kernels.decode_kernel, monkeypatch)
    monkeypatch.setattr(triton_kernels, "decode_kernel", last)
    triton_kernels.decode([part._replace(values=target)])
    assert all(last.reaches_end_of(tensor, "read") for tensor in (payload, base, *held))
    assert all(last.reaches_end_of(tensor, "written") for tensor in (target, *new))
