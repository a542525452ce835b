"""Rules of other systems on an emulated accelerator: bytes handed to collectives, and launches and bytes of kernels."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.accelerator import device, device_type
from benchmarks.accelerator.device import EmulatedAccelerator
from benchmarks.accelerator.program import KERNEL_SECONDS, LAUNCHES, RecordedCollective
from benchmarks.cluster.ring_rules import gathered_attention, residual_attention, residual_bytes
from benchmarks.cluster.rules import RULES, Rule
from benchmarks.cluster.ulysses_rules import CodedUlysses, UlyssesCodes
from tests import ranks
from xfuser_cocodiff.tools.accelerator.accelerators import ACCELERATORS

NUM_LAUNCHES = {"fp4": 2 + 2, "int8": 2 + 2, "fp8": 2 + 6 + 2}
SHAPE = (1, 24, 9216, 128)
VALUES = torch.Size(SHAPE).numel()
RANKS = 4


def bytes_per_value(rule: Rule, letter: str) -> float:
    """Return the bytes of a value in all-to-alls."""
    return (rule.ulysses or UlyssesCodes()).row_bytes(letter, SHAPE[-1]) / SHAPE[-1]


@contextmanager
def accelerator() -> Iterator[tuple[EmulatedAccelerator, list[torch.Tensor]]]:
    """Return a context with an H100 of four, and Q, K and V on it."""
    emulated = device_type.register()
    dist.destroy_process_group()
    os.environ.update(RANK="0", WORLD_SIZE=str(RANKS))
    dist.init_process_group(device_type.BACKEND, store=FakeStore(), rank=0, world_size=RANKS)
    with device.EmulatedAccelerator(ACCELERATORS["h100-sxm"]) as emulator, torch.inference_mode():
        yield emulator, [torch.empty(SHAPE, dtype=torch.bfloat16, device=emulated) for _ in range(3)]


def run_codes(rank: int) -> dict[str, tuple[int, float, list[RecordedCollective]]]:
    """Return launches, kernel seconds and collectives of one attention by rule."""
    results = {}
    with accelerator() as (emulator, tensors):
        for rule in [rule for rule in RULES.values() if rule.ulysses]:
            ulysses = CodedUlysses(rule.ulysses, dist.group.WORLD, emulator)
            for _ in range(2):
                emulator.begin_step()
                received = ulysses.exchange_inputs("qkv", tensors)
                assert all(each.shape == (1, 6, 4 * 9216, 128) for each in received)
                assert ulysses.exchange_output(received[0]).shape == SHAPE
                program = emulator.end_step()
            results[rule.name] = program.totals[LAUNCHES], program.totals[KERNEL_SECONDS], program.collectives
        emulator.begin_step()
        few = [tensors[0], *(each[:, :4] for each in tensors[1:])]  # grouped-query attention
        received = CodedUlysses(RULES["int8"].ulysses, dist.group.WORLD, emulator).exchange_inputs("qkv", few)
        assert [each.shape[1] for each in received] == [6, 1, 1]
    return results


def test_kernels_cost_their_bytes_on_an_accelerator() -> None:
    [results] = ranks.run(run_codes, 1)
    # Each message is encoded and decoded; FP8 rotates Q and K.
    assert {name: launches for name, (launches, *_) in results.items()} == NUM_LAUNCHES
    bandwidth = ACCELERATORS["h100-sxm"].bytes_per_second
    for name, (_, seconds, sent) in results.items():
        coded = sum(bytes_per_value(RULES[name], letter) for letter in "qkvo") * VALUES
        assert sum(sum(each.sent) for each in sent) == pytest.approx(coded, rel=0.001), name
        # All of Q, K, V and O are read once and written once in bf16, and their codes are written and read.
        if name == "fp4":
            assert seconds == pytest.approx((4 * 2 * 2 * VALUES + 2 * coded) / bandwidth, rel=1e-6)
    assert results["fp8"][2][1].start.offsets


def run_rings(rank: int) -> list[list[tuple[int, ...]]]:
    """Return the bytes sent to each rank by each collective of a gathering ring, and of residuals."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> tuple[torch.Tensor, ...]:
        assert key.shape == value.shape
        return query, query[..., 0].float()

    found = []
    with accelerator() as (emulator, tensors):
        emulator.begin_step()
        gathered_attention(dist.group.WORLD, attend, *tensors, {})
        found.append([each.sent for each in emulator.end_step().collectives])
        emulator.begin_step()
        assert residual_attention(dist.group.WORLD, emulator, attend, *tensors, {}).shape == SHAPE
        found.append([each.sent for each in emulator.end_step().collectives])
    return found


def test_rings_send_k_and_v_or_their_residuals() -> None:
    [[gathered, residuals]] = ranks.run(run_rings, 1)
    both = 2 * VALUES * 2
    assert gathered == [(both,) * RANKS]
    assert [sum(sent) for sent in residuals] == [residual_bytes((2, *SHAPE))] * (RANKS - 1)
    assert residual_bytes((2, *SHAPE)) / (2 * VALUES) == pytest.approx(0.25, abs=0.003)


def test_rules_state_their_source() -> None:
    for name, rule in RULES.items():
        assert rule.name == name and rule.system and rule.source
        assert rule.is_lossless is not (rule.ulysses is not None or rule.ring == "residuals")
    assert bytes_per_value(RULES["fp4"], "k") == 4.5 / 8
