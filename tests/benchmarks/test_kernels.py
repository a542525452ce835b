"""Times of kernels: bytes, rows and the printed table."""

import dataclasses

import pytest
import torch

from benchmarks import kernels as bench
from tests.engine.codec.case import DEVICE
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.lab.simulation.workloads import WORKLOADS

SMALL = dataclasses.replace(WORKLOADS["flux.1-dev"], heads=8, head_dim=16, text_tokens=8)


def test_rows_count_the_bytes_that_kernels_read_and_write(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(bench.WORKLOADS, "small", SMALL)
    monkeypatch.setattr(bench, "_host_seconds", lambda call: (call(), 1e-3)[1])
    record = bench.measure(DEVICE, 4, [("small", 64)])
    tensor = 24 * 8 * 16 * 2 // 4  # per rank: 16 image tokens and 8 of text, 8 heads of 16, bf16
    crossing = tensor // 2
    rows = crossing // 2 // 32  # one for two of six tokens
    payload = 2 * -(-rows // 8) * 32 + rows + 8  # two bytes hold 8 rows at 2 bits; each row has a scale; and a gain
    references = crossing // 2 + rows  # in 8 bits: the last two, and the next
    expected = crossing + 3 * references + payload
    assert {row["kernel"]: row["bytes"] for row in record["rows"]} == {"encode": expected, "decode": expected}
    assert [row["ratio_to_copy"] for row in record["rows"]] == [1, 1]
    assert record["host_seconds"] == dict.fromkeys(bench.MODES, 1e-3)
    bench.show(record)
    assert "all-to-alls in mode balanced: 1.00 ms" in capsys.readouterr().out


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
