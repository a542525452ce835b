"""Calls of the kernels: bytes, and what a layer sends."""

import dataclasses

import pytest
import torch

from benchmarks.one_gpu import kernel_calls as bench
from tests.engine.codec.case import DEVICE
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.tools.simulation.workloads import WORKLOADS

SMALL = dataclasses.replace(WORKLOADS["flux.1-dev"], heads=8, head_dim=16, text_tokens=8)


def test_calls_count_the_bytes_that_kernels_read_and_write() -> None:
    tensor = 24 * 8 * 16 * 2 // 4  # per rank: 16 image tokens and 8 of text, 8 heads of 16, bf16
    crossing = tensor // 2
    rows = crossing // 2 // 32  # one for two of six tokens
    payload = 2 * -(-rows // 8) * 32 + rows + 8  # two bytes hold 8 rows at 2 bits; each row has a scale; and a gain
    references = crossing // 2 + rows  # in 8 bits: the last two, and the next
    calls = bench.kernel_calls(SMALL, 64, 4, DEVICE)
    expected = crossing + 3 * references + payload
    assert {each.name: each.nbytes for each in calls} == {"encode": expected, "decode": expected}
    for each in (*calls, bench.copy_of(expected, DEVICE)):
        each.call()


@pytest.mark.parametrize("degree", [2, 4])
def test_coded_layers_send_encoded_kv_between_nodes(degree: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gathered, gather = [], bench._NoCommunication.start_gather

    def start_gather(self: object, block: torch.Tensor, plan: Plan, number: int) -> object:
        gathered.append((plan.labels[number], block.nbytes))
        return gather(self, block, plan, number)

    monkeypatch.setattr(bench._NoCommunication, "start_gather", start_gather)
    for mode in ("exact", "balanced"):
        gathered.clear()
        bench._layer_all_to_alls(SMALL, 32, degree, DEVICE, mode)()
        if mode == "exact":
            assert gathered == []
            continue
        (first, keyframe), (later, encoded) = gathered
        values = 2 * 8 * 32 * 16  # of K and V: 8 heads, 32 tokens, head dim 16
        assert (first, later) == ("node", "node")
        assert encoded < 0.35 * 2 * values < 2 * values <= keyframe  # two bits and scales; values themselves at first
