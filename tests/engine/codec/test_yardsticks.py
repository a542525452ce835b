"""Errors of FP8 and FP4 on the tensors of a run, against a reference that searches all representable numbers."""

import itertools

import pytest
import torch

from xfuser_cocodiff.engine.codec import yardsticks

ROWS = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
E4M3 = [0.0, *(2.0**-9 * mantissa for mantissa in range(1, 8))]
E4M3 += [2.0**exponent * (1 + mantissa / 8) for exponent, mantissa in itertools.product(range(-6, 9), range(8))][:-1]
"""Magnitudes of FP8 (e4m3): up to 448, since the largest code is NaN."""
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
"""Magnitudes of FP4 (e2m1)."""


def nearest(values: torch.Tensor, magnitudes: list[float]) -> torch.Tensor:
    """Return the nearest representable number to each value."""
    grid = torch.tensor([sign * each for each in magnitudes for sign in (1, -1)])
    return grid[(values[..., None] - grid).abs().argmin(-1)]


def searched(name: str, rows: torch.Tensor) -> torch.Tensor:
    """Return rows as the definition of a yardstick gives them."""
    if name == yardsticks.FP8:
        scale = rows.abs().amax(-1, keepdim=True) / 448
        return nearest(rows / scale, E4M3) * scale
    tensor_scale = rows.abs().max() / (448 * 6)
    blocks = (rows / tensor_scale).unflatten(-1, (-1, 16))
    scale = nearest(blocks.abs().amax(-1, keepdim=True) / 6, E4M3)
    return (nearest(blocks / scale, E2M1) * scale).flatten(-2) * tensor_scale


def error(rounded: torch.Tensor, rows: torch.Tensor) -> float:
    return ((rounded - rows).norm() / rows.norm()).item()


@pytest.mark.parametrize(
    ("name", "typical"), [(yardsticks.FP8, 0.026), (yardsticks.FP4, 0.095)], ids=[*yardsticks.YARDSTICKS]
)
def test_errors_are_those_of_the_nearest_numbers(name: str, typical: float) -> None:
    measured = yardsticks.measure(ROWS)[name]
    found = (measured[0] / measured[1]).sqrt().item()
    assert found == pytest.approx(error(searched(name, ROWS), ROWS), rel=1e-3)
    assert found == pytest.approx(typical, rel=0.05)


def test_some_rows_stand_for_all() -> None:
    """Of a whole tensor (P, G, H, T, D), in the types of models."""
    values = torch.randn(2, 1, 8, 4096, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    for name, measured in yardsticks.measure(values).items():
        whole = values.flatten(0, -2)[:8192].float()
        found = (measured[0] / measured[1]).sqrt().item()
        assert found == pytest.approx(error(searched(name, whole), whole), rel=0.03)


def test_zeros_and_tiny_rows_are_kept() -> None:
    """A scale that is zero would give NaN."""
    for rows in (torch.zeros(4, 32), torch.full((4, 32), 1e-40)):
        for error_energy, _ in yardsticks.measure(rows).values():
            assert error_energy.isfinite() and error_energy < 1e-30
