"""Tests of the accelerators: the roofline of a kernel, and rates below the peaks of the data sheets."""

import dataclasses

import pytest

from xfuser_cocodiff.tools.accelerator.accelerators import ACCELERATORS

PEAKS = {
    "max-1550-tile": (256e12, 3.28e12 / 2),
    "h100-sxm": (989e12, 3.35e12),
    "a100-80gb": (312e12, 2.04e12),
    "l20": (119.5e12, 864e9),
    "arc-pro-b60": (98.3e12, 456e9),
}
"""FLOP/s in bf16 and memory bandwidth of the data sheets; of the tile, the measured peak of its GEMM."""


@pytest.mark.parametrize("name", ACCELERATORS)
def test_rates_are_below_the_peaks(name: str) -> None:
    accelerator, (flops, bandwidth) = ACCELERATORS[name], PEAKS[name]
    assert 0.5 * flops < accelerator.matmul_flops < flops
    assert 0.3 * flops < accelerator.narrow_attention_flops <= 1.05 * accelerator.attention_flops < flops
    assert 0.4 * bandwidth < accelerator.bytes_per_second < bandwidth
    assert all(0 < value < 1e-4 for key, value in dataclasses.asdict(accelerator).items() if key.endswith("seconds"))
