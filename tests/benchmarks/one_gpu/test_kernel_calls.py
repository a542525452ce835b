"""Calls of the kernels: bytes that they move."""

import dataclasses

from benchmarks.one_gpu import kernel_calls as bench
from tests.engine.codec.case import DEVICE
from xfuser_cocodiff.tools.simulation.workloads import WORKLOADS

SMALL = dataclasses.replace(WORKLOADS["flux.1-dev"], heads=8, head_dim=16, text_tokens=8)


def test_calls_count_the_bytes_that_kernels_read_and_write() -> None:
    tensor = 24 * 8 * 16 * 2 // 4  # per rank: 16 image tokens and 8 of text, 8 heads of 16, bf16
    crossing = tensor // 2
    rows = crossing // 2 // 32  # one for two of six tokens
    payload = 2 * -(-rows // 8) * 32 + rows + 8  # two bytes hold 8 rows at 2 bits; each row has a scale; and a gain
    references = crossing // 2 + rows  # in 8 bits: the last two, and the next
    nbytes, calls = bench.kernel_calls(SMALL, 64, 4, DEVICE)
    assert nbytes == crossing + 3 * references + payload
    for call in (*calls.values(), bench.copy_of(nbytes, DEVICE)):
        call()
