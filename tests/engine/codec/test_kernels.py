"""Both backends encode and decode what float64 arithmetic gives, and each decodes the other's payloads to its bits.

Triton's kernels are run by its interpreter without a GPU.
"""

import itertools

import pytest
import torch

from tests.engine.codec.case import (
    DEVICE,
    EXTRAPOLATED,
    FIRST,
    KINDS,
    MIDDLE,
    REFERENCE,
    SECOND,
    STARTED,
    Case,
    assert_equal_up_to_scales,
    same_reference,
)
from tests.quick import covering
from xfuser_cocodiff.engine.codec import kernels, torch_kernels
from xfuser_cocodiff.engine.codec.quantize import GRIDS, PER_OCTAVE
from xfuser_cocodiff.engine.codec.rows import (
    GAIN_BYTES,
    GAIN_STEPS,
    Int8Rows,
    in_rows,
    sample_stride,
    write_remote_slots,
)

DTYPES = torch.float32, torch.bfloat16, torch.float16
LOCAL_SLOTS = None, FIRST, SECOND, MIDDLE


@pytest.mark.parametrize(
    ("dtype", "local_slots", "bits", "kind", "has_base"),
    [*covering(itertools.product(DTYPES, LOCAL_SLOTS, GRIDS, KINDS, (False, True)), 2)],
    ids=str,
)
def test_backends_agree(triton_kernels, dtype, local_slots, bits, kind, has_base) -> None:
    case = Case(dtype, local_slots, slots=3 + (local_slots == MIDDLE))
    prediction = case.prediction(kind)
    more = {"values": case.plus_base(), "base": case.base} if has_base else {}
    backends = triton_kernels, torch_kernels
    found, plain = (case.encoded(each, case.part(prediction, bits, **more)) for each in backends)
    assert_equal_up_to_scales(case, found, plain)
    for index, (rtol, atol) in enumerate(((1e-2, 1e-3), (1e-3, 0))):
        torch.testing.assert_close(found.energies[index], plain.energies[index], rtol=rtol, atol=atol)
    if kind == EXTRAPOLATED:
        assert (found.gains.int() - plain.gains.int()).abs().max() <= 1  # sums in another order
    elif kind == STARTED:
        assert torch.equal(found.gains, prediction.gains) and torch.equal(plain.gains, prediction.gains)
    for part, *_ in (found, plain):
        if part.sends_gain:  # the receiver reads the gain from the payload, and ignores its own
            assert torch.equal(case.remote(part.payload)[:, -GAIN_BYTES], prediction.gains)
            part = part._replace(prediction=prediction._replace(gains=torch.full_like(prediction.gains, 3)))
        # The receiver adds what it has, which is not what the sender has subtracted.
        received = case.base + 0.25 if has_base else None
        targets = []
        for each in backends:
            targets.append(case.decoded(each, part, received))
        assert torch.equal(*targets) and case.remote(targets[0]).any()


@pytest.mark.parametrize("backend", [kernels.TRITON, kernels.TORCH])
@pytest.mark.parametrize(
    ("dtype", "bits", "kind", "has_base"),
    [*covering(itertools.product((torch.float32, torch.bfloat16), GRIDS, KINDS, (False, True)), 1)],
    ids=str,
)
def test_what_is_decoded_is_what_float64_arithmetic_gives(request, backend, dtype, bits, kind, has_base) -> None:
    """Check targets, references, energies and gains, up to rounding and values between two levels."""
    kernel = torch_kernels if backend == kernels.TORCH else request.getfixturevalue("triton_kernels")
    case, grid = Case(dtype, SECOND, dim=64), GRIDS[bits]  # one token per row
    prediction = case.prediction(kind)
    base = case.base.double() if has_base else torch.zeros(case.shape, dtype=torch.float64, device=DEVICE)
    values = case.plus_base() if has_base else case.values
    encoded = case.encoded(
        kernel, case.part(prediction, bits, values=values, **({"base": case.base} if has_base else {}))
    )

    def in_float64(rows: Int8Rows | None) -> torch.Tensor:
        return torch.zeros(case.shape, dtype=torch.float64) if rows is None else rows.values.double().view(case.shape)

    exact = case.remote(values).double()
    coded, reference = exact - base, in_float64(prediction.reference)
    change = reference - in_float64(prediction.previous)
    gains = prediction.gains.double() / GAIN_STEPS if kind == EXTRAPOLATED else torch.zeros(2, dtype=torch.float64)
    predicted = reference + gains.view(-1, 1, 1, 1, 1) * change
    residual = coded - predicted
    largest = residual.abs().amax(-1, keepdim=True)
    if grid.by_maximum:
        code = torch.floor(PER_OCTAVE * torch.log2(largest / grid.reach) + 1)
    else:
        scale = residual.square().mean(-1, keepdim=True).sqrt().maximum(0.4 * largest)
        code = torch.floor(PER_OCTAVE * torch.log2(scale) + 0.5)
    width = grid.width * 2 ** (code / PER_OCTAVE)
    level = torch.floor(residual / width + grid.levels / 2).clamp(0, grid.levels - 1)
    expected = predicted + (level - (grid.levels - 1) / 2) * width

    target = case.remote(case.decoded(kernel, encoded.part, case.base if has_base else None)).double()
    rounding = 16 * torch.finfo(dtype).eps
    error = (target - base - expected).abs()
    wrong = error > rounding * (1 + target.abs())  # a scale or a residual on a boundary, within rounding
    assert wrong.double().mean() < 0.01
    held = in_float64(encoded.part.new_reference)  # in 8 bits
    assert ((held - expected).abs() <= 1.13 * expected.abs().amax(-1, keepdim=True) / 127 / 2 + 1e-6)[~wrong].all()
    error_energy, value_energy = encoded.energies.double()
    torch.testing.assert_close(error_energy, (coded - expected).square().sum(), rtol=2e-2, atol=1e-6)
    torch.testing.assert_close(value_energy, exact.square().sum(), rtol=1e-3, atol=0)
    if kind == EXTRAPOLATED:
        stride = sample_stride(case.shape[3])
        moved, changed = ((coded - reference)[..., ::stride, :], change[..., ::stride, :])
        wanted = ((moved * changed).sum((1, 2, 3, 4)) / changed.square().sum((1, 2, 3, 4)) * GAIN_STEPS).round()
        assert (encoded.gains.double() - wanted.clamp(0, GAIN_STEPS)).abs().max() <= 1


@pytest.mark.parametrize(("dim", "tokens", "bits"), [(8, 8, 1.6), (24, 20, 2.7), (80, 1, 3.2), (128, 7, 5.3)])
def test_backends_agree_for_any_head_dim_and_number_of_tokens(triton_kernels, dim, tokens, bits) -> None:
    case = Case(torch.float32, SECOND, dim=dim, tokens=tokens)
    found, plain = (
        case.encoded(each, case.part(case.prediction(EXTRAPOLATED), bits)) for each in (triton_kernels, torch_kernels)
    )
    assert_equal_up_to_scales(case, found, plain)
    case.decoded(triton_kernels, found.part)


@pytest.mark.parametrize("backend", [kernels.TRITON, kernels.TORCH])
@pytest.mark.parametrize(
    ("kind", "field"),
    [(REFERENCE, "reference"), (STARTED, "reference"), (EXTRAPOLATED, "reference"), (EXTRAPOLATED, "previous")],
)
def test_a_reference_may_be_written_in_place(request, backend, kind, field) -> None:
    """At both ends, over the reference or the previous one, with tiles that are not full."""
    kernel = torch_kernels if backend == kernels.TORCH else request.getfixturevalue("triton_kernels")
    case = Case(torch.bfloat16, MIDDLE, slots=4, tokens=41)
    for bits in (8, 1.6):
        expected = case.encoded(kernel, case.part(case.prediction(kind), bits, base=case.base))
        target = case.decoded(kernel, expected.part, case.base)
        predictions = case.prediction(kind), case.prediction(kind)
        sent, received = (
            case.part(each, bits, base=case.base)._replace(new_reference=getattr(each, field)) for each in predictions
        )
        energies, found = torch.empty(1, 2, device=DEVICE), torch.zeros_like(target)
        kernel.encode([sent], energies)
        kernel.decode([received._replace(values=found, payload=sent.payload)])
        for part in (sent, received):
            assert same_reference(part.new_reference, expected.part.new_reference)
        assert torch.equal(case.remote(sent.payload), case.remote(expected.part.payload))
        assert torch.equal(found, target) and torch.equal(energies[0], expected.energies)
        assert kind == REFERENCE or torch.equal(sent.prediction.gains, expected.gains)


def test_gains_are_between_0_and_1(triton_kernels) -> None:
    """Where values move on faster than before, or back, the gain is the nearest one that does not overshoot."""
    case = Case(torch.float32, SECOND)
    factors = torch.tensor([3.0, -1.0], device=DEVICE).view(2, 1, 1, 1, 1)
    moved = case.reference + factors * (case.reference - case.previous)
    write_remote_slots(case.values, moved, SECOND)
    for kernel in (triton_kernels, torch_kernels):
        encoded = case.encoded(kernel, case.part(case.prediction(EXTRAPOLATED), 4))
        assert encoded.gains.tolist() == [GAIN_STEPS, 0]


@pytest.mark.parametrize(("bits", "bad"), [(8, float("nan")), (2, float("inf")), (3.2, -float("inf"))])
def test_not_finite_values_affect_their_row_only_and_the_energies(triton_kernels, bad, bits) -> None:
    case = Case(torch.float32, None, dim=64)
    case.values[1, 0, 2, 4, 3] = bad
    for kernel in (triton_kernels, torch_kernels):
        part, energies, _ = case.encoded(kernel, case.part(case.prediction(REFERENCE), bits))
        assert not energies.isfinite().any()
        wrong = ~case.decoded(kernel, part).isfinite().all(-1)
        assert wrong.sum() == 1 and wrong[1, 0, 2, 4]
        assert torch.equal(~part.new_reference.values.isfinite().all(-1), in_rows(wrong[..., None])[..., 0])
