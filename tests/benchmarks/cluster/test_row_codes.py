"""Stateless codes of other systems, against their number formats."""

import pytest
import torch

from benchmarks.cluster import row_codes

E2M1 = [sign * number for sign in (1, -1) for number in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]


def rows(seed: int = 0, dim: int = 64) -> torch.Tensor:
    values = torch.randn(5, 7, dim, generator=torch.Generator().manual_seed(seed))
    values[2] *= 1e3
    values[3, 4] = 0
    values[4, 2, 9] = 30  # an outlier
    return values


@pytest.mark.parametrize("code", row_codes.CODES.values(), ids=list(row_codes.CODES))
@pytest.mark.parametrize("dim", [16, 64, 128])
def test_a_row_has_the_stated_bytes(code: row_codes.RowCode, dim: int) -> None:
    encoded = code.encode(rows(dim=dim), None)
    assert encoded.dtype == torch.uint8 and encoded.shape == (5, 7, code.row_bytes(dim))
    assert code.decode(encoded, None).shape == (5, 7, dim)


def test_bytes_are_those_of_the_systems() -> None:
    sizes = {name: code.row_bytes(128) for name, code in row_codes.CODES.items()}
    assert sizes == {"fp8": 128, "row-fp8": 132, "row-fp8-half": 130, "fp4": 64 + 8, "int8": 132}


def test_fp4_rounds_to_the_nearest_number_of_the_format() -> None:
    values = rows()
    decoded = row_codes.FP4.round_trip(values).unflatten(-1, (-1, 16))
    blocks = values.unflatten(-1, (-1, 16))
    exact_scale = blocks.abs().amax(-1, keepdim=True) / 6
    scale = exact_scale.clamp(2**-9, 448).to(torch.float8_e4m3fn).float()
    candidates = scale[..., None] * torch.tensor(E2M1)
    distance = (blocks[..., None] - candidates).abs().amin(-1)
    torch.testing.assert_close((blocks - decoded).abs(), distance)
    is_large = exact_scale[..., 0] > 2**-6  # scales below are not normal numbers
    error = (decoded - blocks).norm(dim=-1) / blocks.norm(dim=-1)
    assert 0.02 < error[is_large].mean() < 0.15


@pytest.mark.parametrize("code", [row_codes.ROW_FP8, row_codes.ROW_FP8_HALF], ids=lambda code: code.name)
def test_fp8_rows_keep_three_bits_of_mantissa(code: row_codes.RowCode) -> None:
    values = rows()
    decoded = code.round_trip(values)
    is_normal = values.abs() > values.abs().amax(-1, keepdim=True) * 2**-14
    slack = 2**-8 if code is row_codes.ROW_FP8_HALF else 0  # a rounded scale may clip the largest value
    error = ((decoded - values) / values)[is_normal].abs().max()
    assert 2**-5 < error <= 2**-4 + slack
    assert torch.equal(decoded[3, 4], torch.zeros(64))


def test_int8_rows_round_to_steps_of_their_largest_value() -> None:
    values, shift = rows(), torch.linspace(-2, 2, 64)
    decoded = row_codes.INT8.round_trip(values, shift)
    shifted = values - shift
    step = shifted.abs().amax(-1, keepdim=True) / 127
    assert ((decoded - values).abs() <= step / 2 * 1.001).all()
    steps = (decoded - shift) / step
    torch.testing.assert_close(steps, steps.round(), atol=1e-3, rtol=0)


def test_static_fp8_uses_the_scale_of_its_channel() -> None:
    values = rows().clamp(-50, 50)
    scale = values.abs().amax((0, 1)).clamp(min=1e-6) / row_codes.FP8_LARGEST
    decoded = row_codes.STATIC_FP8.round_trip(values, scale)
    assert torch.equal(decoded, (values / scale).to(torch.float8_e4m3fn).float() * scale)
    assert row_codes.STATIC_FP8.round_trip(torch.tensor([1e4])).item() == 448  # saturates, and is not NaN
