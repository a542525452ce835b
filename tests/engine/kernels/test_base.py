"""Kernels with a base encode and decode the difference of values to it, as float64 arithmetic does."""

import itertools
from typing import NamedTuple

import pytest
import torch

from tests.engine.kernels.case import DEVICE, FIRST, MIDDLE, SECOND, Case, assert_equal_up_to_scales
from tests.quick import covering, in_turn
from xfuser_cocodiff.engine import kernels
from xfuser_cocodiff.engine.kernels import torch_kernels
from xfuser_cocodiff.engine.kernels.quantize import GRIDS, ORIGIN, PER_OCTAVE
from xfuser_cocodiff.engine.kernels.rows import (
    GAIN_BYTES,
    GAIN_STEPS,
    ActiveTokens,
    Base,
    MessagePart,
    Prediction,
    remote_slots,
    sample_stride,
    write_remote_slots,
)

DTYPES = torch.float32, torch.bfloat16, torch.float16
LOCAL_SLOTS = None, FIRST, SECOND, MIDDLE
WEIGHTS = 1.0, 1.25, 0.7
KEYFRAME = -1.0
"""Stands for a gain: zeros are predicted."""


BACKENDS = [kernels.TRITON, kernels.TORCH]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest):
    """Each backend."""
    return torch_kernels if request.param == kernels.TORCH else request.getfixturevalue("triton_kernels")


class Expected(NamedTuple):
    """Results of float64 arithmetic for all tokens; float64 (L, G, H, T, D) if not noted."""

    difference: torch.Tensor
    """Values minus weighted base."""
    predicted: torch.Tensor
    """Prediction of the difference."""
    decoded: torch.Tensor
    """Prediction plus the center of the level in which the residual is."""
    width: torch.Tensor
    """Width of the levels of each row, (L, G, H, T, 1)."""


def in_float64(values: torch.Tensor, base: Base, prediction: Prediction, bits: float) -> Expected:
    """Return the results that kernels should have, by the definition of the grid. Rows have one token each."""
    grid = GRIDS[bits]
    difference = values.double() - base.weight * base.values.double()
    reference = prediction.reference.double()
    predicted = reference
    if prediction.previous is not None and prediction.gains is not None:
        gains = prediction.gains.double().view(-1, 1, 1, 1, 1) / GAIN_STEPS
        predicted = reference + gains * (reference - prediction.previous.double())
    residual = difference - predicted
    if grid.by_maximum:
        code = torch.ceil(PER_OCTAVE * torch.log2(residual.abs().amax(-1, keepdim=True) / grid.reach))
    else:
        scale = residual.square().mean(-1, keepdim=True).sqrt().maximum(0.4 * residual.abs().amax(-1, keepdim=True))
        code = torch.round(PER_OCTAVE * torch.log2(scale))
    assert (code.abs() < ORIGIN / 2).all()  # far from both ends of the codes
    width = grid.width * 2 ** (code / PER_OCTAVE)
    centers = (torch.arange(grid.levels, device=DEVICE) - (grid.levels - 1) / 2) * width[..., None]
    nearest = (residual[..., None] - centers).abs().argmin(-1, keepdim=True)
    return Expected(
        difference, predicted, predicted + centers.expand(*residual.shape, -1).gather(-1, nearest)[..., 0], width
    )


def is_sent(active: ActiveTokens | None, like: torch.Tensor) -> torch.Tensor:
    """Return which values (L, G, H, T, D) are sent."""
    if active is None:
        return torch.ones(like.shape, dtype=torch.bool, device=DEVICE)
    return active.mask[:, :, None, : active.tokens, None].bool().expand(like.shape)


def prediction_of(case: Case, gain: float) -> Prediction:
    return Prediction(torch.zeros_like(case.reference)) if gain == KEYFRAME else case.prediction(gain)


@pytest.mark.parametrize(
    ("dtype", "bits", "active", "gain", "weight", "backend"),
    in_turn(covering(itertools.product(DTYPES, GRIDS, (None, 5), (KEYFRAME, 0.0, 0.5), WEIGHTS), 2), BACKENDS),
    ids=str,
    indirect=["backend"],
)
def test_a_base_gives_what_float64_arithmetic_gives(backend, dtype, bits, active, gain, weight) -> None:
    """Check references, targets, energies, gains and scores, up to rounding and values between two levels."""
    case = Case(dtype, SECOND, dim=64)  # one token per row
    base, prediction, active = case.base(weight), prediction_of(case, gain), case.active(active)
    values, sends_gain = case.plus(base), gain == 0.5
    remote = remote_slots(values, SECOND)
    expected = in_float64(remote, base, prediction, bits)
    payload, encoded = case.encoded(backend, prediction, bits, active, values=values, sends_gain=sends_gain, base=base)

    sent, rounding = is_sent(active, remote), 16 * torch.finfo(dtype).eps
    found = encoded.reference.double()
    torch.testing.assert_close(found[~sent], expected.predicted[~sent], rtol=rounding, atol=rounding)
    # A scale or a residual on a boundary, within rounding, may go either way.
    error = (found - expected.decoded).abs()
    wrong = sent & (error > rounding * (1 + expected.decoded.abs()))
    assert wrong.double().mean() < (0.01 if dtype == torch.float32 else 0.1)
    assert (error[wrong] < 1.3 * expected.width.expand_as(error)[wrong]).all()

    error_energy = (expected.difference.to(dtype).double() - found).square().sum()
    torch.testing.assert_close(encoded.error_energy.double(), error_energy, rtol=2e-2, atol=1e-6)
    torch.testing.assert_close(encoded.value_energy.double(), remote.double().square().sum(), rtol=1e-3, atol=0)
    scores = backend.scores(values, prediction, SECOND, base).double()
    expected_scores = (expected.difference - expected.predicted).square().sum((2, 4))
    torch.testing.assert_close(scores, expected_scores, rtol=1e-4 if dtype == torch.float32 else 5e-2, atol=1e-4)
    if prediction.previous is not None:
        change = (prediction.reference.double() - prediction.previous.double())[..., :: sample_stride(11), :]
        moved = (expected.difference - prediction.reference.double())[..., :: sample_stride(11), :]
        gains = ((moved * change).sum((1, 2, 3, 4)) / change.square().sum((1, 2, 3, 4)) * GAIN_STEPS).round()
        assert (encoded.gains.double() - gains.clamp(0, GAIN_STEPS)).abs().max() <= 1
    else:
        assert encoded.gains is None

    # The receiver adds what it has, which is not what the sender has subtracted.
    received = Base((base.values.float() + 0.25).to(dtype), weight)
    target = torch.zeros_like(case.target)
    decoded = backend.decode(payload, prediction, bits, active, target, SECOND, sends_gain, received)
    assert torch.equal(decoded, encoded.reference) and not target[SECOND].any()
    total = found + weight * received.values.double()
    torch.testing.assert_close(remote_slots(target, SECOND).double(), total, rtol=rounding, atol=rounding)


@pytest.mark.parametrize(
    ("dtype", "local_slots", "bits", "active", "gain", "weight", "backend"),
    in_turn(
        covering(itertools.product(DTYPES, LOCAL_SLOTS, GRIDS, (None, 5), (KEYFRAME, 0.0, 0.5), WEIGHTS), 2), BACKENDS
    ),
    ids=str,
    indirect=["backend"],
)
def test_a_base_gives_the_bits_of_a_difference_made_before(
    backend, dtype, local_slots, bits, active, gain, weight
) -> None:
    """Equal, bit for bit, the same kernel without a base that gets the difference as values: the wire format stays."""
    case = Case(dtype, local_slots, slots=3 + (local_slots == MIDDLE))
    base, how = case.base(weight), (prediction_of(case, gain), bits, case.active(active))
    values = case.plus(base)
    made = torch.empty_like(values).copy_(values)
    difference = remote_slots(values, local_slots).float() - base.values.float() * weight
    write_remote_slots(made, difference.to(dtype), local_slots)
    payload, encoded = case.encoded(backend, *how, values=values, sends_gain=gain == 0.5, base=base)
    plain_payload, plain = case.encoded(backend, *how, values=made, sends_gain=gain == 0.5)
    assert torch.equal(remote_slots(payload, local_slots), remote_slots(plain_payload, local_slots))
    assert torch.equal(encoded.reference, plain.reference) and torch.equal(encoded.error_energy, plain.error_energy)
    assert encoded.gains is plain.gains is None or torch.equal(encoded.gains, plain.gains)
    scores = backend.scores(values, how[0], local_slots, base), backend.scores(made, how[0], local_slots)
    assert torch.equal(*scores)
    target = torch.zeros_like(case.target)
    decoded = backend.decode(payload, *how, target, local_slots, gain == 0.5, base)
    assert torch.equal(decoded, encoded.reference)
    total = (base.values.float() * weight + decoded.float()).to(dtype)
    assert torch.equal(remote_slots(target, local_slots), total)


@pytest.mark.parametrize(("dim", "tokens", "bits"), [(8, 8, 1.6), (24, 64, 2.7), (80, 1, 1.6), (128, 7, 2)])
def test_kernels_with_a_base_equal_pytorch_for_any_head_dim_and_number_of_tokens(
    triton_kernels, dim, tokens, bits
) -> None:
    case = Case(torch.float32, SECOND, dim=dim, tokens=tokens)
    base, how = case.base(1.25), (case.prediction(0.5), bits, None)
    values = case.plus(base)
    found, plain = (case.encoded(kernel, *how, values=values, base=base) for kernel in (triton_kernels, torch_kernels))
    assert_equal_up_to_scales(case, found, plain, case.rows(bits), bits)
    targets = torch.zeros_like(case.target), torch.zeros_like(case.target)
    for kernel, target in zip((triton_kernels, torch_kernels), targets, strict=True):
        kernel.decode(found[0], *how, target, SECOND, False, base)
    assert torch.equal(*targets) and targets[0].any()
    scores = (each.scores(values, how[0], SECOND, base) for each in (triton_kernels, torch_kernels))
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-6)


def test_a_base_may_have_any_strides(backend) -> None:
    case = Case(torch.bfloat16, FIRST)
    how, found = (case.prediction(0.5), 2, None), []
    base = case.base(1.25)
    values = case.plus(base)
    across = base.values.transpose(3, 4).contiguous().transpose(3, 4)
    apart = torch.zeros(*base.values.shape[:-1], 40, dtype=torch.bfloat16, device=DEVICE)[..., 8:24]
    for other in (base.values.contiguous(), base.values, across, apart.copy_(base.values)):
        base, target = Base(other, 1.25), torch.zeros_like(case.target)
        payload, encoded = case.encoded(backend, *how, values=values, base=base)
        backend.decode(payload, *how, target, FIRST, False, base)
        found.append(
            (remote_slots(payload, FIRST), encoded.reference, target, backend.scores(values, how[0], FIRST, base))
        )
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))


def test_values_that_are_not_finite_show_in_both_energies(backend) -> None:
    case = Case(torch.float32, None)
    base = case.base(1.0)
    values = case.plus(base)
    values[1, 0, 2, 4, 3] = float("nan")
    _, encoded = case.encoded(backend, case.prediction(), 2, None, values=values, base=base)
    assert not encoded.error_energy.isfinite() and not encoded.value_energy.isfinite()
    wrong = ~encoded.reference.isfinite().all(-1)
    assert wrong[1, 0, 2, 4] and wrong.sum() == 1


def test_a_base_that_does_not_fit_is_refused() -> None:
    case = Case(torch.float32, SECOND)
    prediction, base = case.prediction(0.5), case.base(1.0)
    payload = torch.zeros(3, 8, dtype=torch.uint8, device=DEVICE)
    in_slots = torch.zeros(3, *base.values.shape[1:], device=DEVICE)
    for other in (base._replace(values=in_slots), base._replace(values=base.values.double())):
        part = MessagePart(case.values, prediction, 2, None, payload, SECOND, False, other)
        for kernel in (kernels.encode, kernels.decode):
            with pytest.raises(ValueError, match="a base of"):
                kernel([part])
        with pytest.raises(ValueError, match="a base of"):
            kernels.scores(case.values, prediction, SECOND, other)
    for known in (prediction, None):
        part = MessagePart(case.values, known, None, None, payload, SECOND, False, base)
        for kernel in (kernels.encode, kernels.decode):
            with pytest.raises(ValueError, match="sent unchanged"):
                kernel([part])


def test_a_gain_travels_with_a_base(backend) -> None:
    case = Case(torch.float32, FIRST)
    base, prediction = case.base(1.0), case.prediction(0.5)
    payload, encoded = case.encoded(backend, prediction, 2, None, values=case.plus(base), sends_gain=True, base=base)
    assert torch.equal(remote_slots(payload, FIRST)[:, -GAIN_BYTES], prediction.gains)
    other = prediction._replace(gains=torch.full_like(prediction.gains, 3))  # the payload's gains count
    assert torch.equal(backend.decode(payload, other, 2, None, case.target, FIRST, True, base), encoded.reference)
