"""Triton's kernels, run by its interpreter without a GPU, encode and decode the same bits as PyTorch's."""

import itertools

import pytest
import torch

from tests.engine.kernels.case import DEVICE, FIRST, MIDDLE, SECOND, Case, assert_equal_up_to_scales
from tests.quick import in_turn, once, pairwise, slow_but
from xfuser_cocodiff.engine.kernels import torch_kernels
from xfuser_cocodiff.engine.kernels.quantize import GRIDS
from xfuser_cocodiff.engine.kernels.rows import GAIN_BYTES, GAIN_STEPS, remote_slots, write_remote_slots

DTYPES = torch.float32, torch.bfloat16, torch.float16
LOCAL_SLOTS = None, FIRST, SECOND, MIDDLE


@pytest.mark.parametrize(
    ("dtype", "local_slots", "bits", "active", "gain", "sends_gain"),
    pairwise(itertools.product(DTYPES, LOCAL_SLOTS, (None, *GRIDS), (None, 5), (0.0, 0.5), (False, True))),
    ids=str,
)
def test_kernels_equal_pytorch(triton_kernels, dtype, local_slots, bits, active, gain, sends_gain) -> None:
    case = Case(dtype, local_slots, slots=3 + (local_slots == MIDDLE))
    is_exact = bits is None and active is None
    sends_gain = sends_gain and not is_exact
    prediction, how = None if is_exact else case.prediction(gain), (bits, case.active(active))
    backends = triton_kernels, torch_kernels
    (payload, encoded), (plain_payload, plain) = (
        case.encoded(kernel, prediction, *how, sends_gain=sends_gain) for kernel in backends
    )
    without_gain = (slice(None), slice(None, -GAIN_BYTES if sends_gain else None))
    both = (payload[without_gain], encoded), (plain_payload[without_gain], plain)
    assert_equal_up_to_scales(case, *both, case.rows(bits, active), bits)
    if sends_gain:  # the receiver reads the gain from the payload, and ignores its own
        for each in (payload, plain_payload):
            assert torch.equal(remote_slots(each, local_slots)[:, -GAIN_BYTES], prediction.gains)
        prediction = prediction._replace(gains=torch.full_like(prediction.gains, 3))
    if gain and (bits or active):
        assert (encoded.gains.int() - plain.gains.int()).abs().max() <= 1  # sums in another order
    if bits or active:
        rtol = 1e-2 if bits else 1e-3
        torch.testing.assert_close(encoded.error_energy, plain.error_energy, rtol=rtol, atol=1e-3)
        torch.testing.assert_close(encoded.value_energy, plain.value_energy, rtol=1e-3, atol=0)
    else:
        assert encoded.error_energy is encoded.value_energy is plain.error_energy is None

    # Both backends decode the payload to the sender's reference.
    expected = torch.zeros_like(case.target)
    write_remote_slots(expected, encoded.reference, local_slots)
    for kernel in backends:
        target = torch.zeros_like(case.target)
        decoded = kernel.decode(payload, prediction, *how, target, local_slots, sends_gain)
        assert torch.equal(decoded, encoded.reference) and torch.equal(target, expected)


@pytest.mark.parametrize(
    ("dim", "tokens", "bits"),
    slow_but(
        [(8, 8, 1.6), (24, 20, 2.7), (80, 1, 1.6), (128, 7, 2)],
        itertools.product([8, 24, 80, 128], [1, 7, 8, 20], [1.6, 2, 2.7]),
    ),
)
def test_kernels_equal_pytorch_for_any_head_dim_and_number_of_tokens(triton_kernels, dim, tokens, bits) -> None:
    case = Case(torch.float32, SECOND, dim=dim, tokens=tokens)
    how = case.prediction(0.5), bits, None
    found, plain = case.encoded(triton_kernels, *how), case.encoded(torch_kernels, *how)
    assert_equal_up_to_scales(case, found, plain, case.rows(bits), bits)
    assert torch.equal(triton_kernels.decode(found[0], *how, case.target, SECOND), found[1].reference)
    scores = (each.scores(case.values, how[0], SECOND) for each in (triton_kernels, torch_kernels))
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "dim", "bits", "active"),
    once(itertools.product([torch.float32, torch.bfloat16], [8, 24, 128], GRIDS, [None, 5])),
    ids=str,
)
def test_channel_scales_divide_residuals(triton_kernels, dtype, dim, bits, active) -> None:
    """Powers of two are exact: values with scales are coded as the divided values are without."""
    case, divided = (Case(dtype, MIDDLE, slots=4, dim=dim, tokens=8) for _ in range(2))
    exponents = torch.randint(0, 5, (2, 3, dim), generator=torch.Generator().manual_seed(dim)).to(DEVICE)
    scales = torch.exp2(exponents)
    of_links = scales[:, None, :, None].to(dtype)
    of_slots = torch.ones(4, 1, 3, 1, dim, dtype=dtype, device=DEVICE)
    write_remote_slots(of_slots, of_links, MIDDLE)
    divided.values.div_(of_slots)
    divided.reference.div_(of_links)
    divided.previous.div_(of_links)
    prediction = case.prediction(0.5)._replace(channel_scales=scales)
    for kernel in (triton_kernels, torch_kernels):
        payload, found = case.encoded(kernel, prediction, bits, case.active(active))
        expected_payload, expected = divided.encoded(kernel, divided.prediction(0.5), bits, divided.active(active))
        assert torch.equal(*(remote_slots(each, MIDDLE) for each in (payload, expected_payload)))
        assert torch.equal(found.reference, expected.reference * of_links)
        error = (remote_slots(case.values, MIDDLE) - found.reference).float().square().sum()
        torch.testing.assert_close(found.error_energy.squeeze(), error, rtol=1e-3, atol=1e-5)
        decoded = kernel.decode(payload, prediction, bits, case.active(active), case.target, MIDDLE)
        assert torch.equal(decoded, found.reference) and torch.equal(remote_slots(case.target, MIDDLE), decoded)


def test_gains_are_between_0_and_1(triton_kernels) -> None:
    """Where values move on faster than before, or back, the gain is the nearest one that does not overshoot."""
    case = Case(torch.float32, SECOND)
    factors = torch.tensor([3.0, -1.0], device=DEVICE).view(2, 1, 1, 1, 1)
    case.values.copy_(case._in_slots(case.reference + factors * (case.reference - case.previous)))
    for kernel in (triton_kernels, torch_kernels):
        _, encoded = case.encoded(kernel, case.prediction(0.5), 4, None, sends_gain=True)
        assert encoded.gains.tolist() == [GAIN_STEPS, 0]


@pytest.mark.parametrize("bits", [None, 2])
def test_encode_without_active_tokens_keeps_the_prediction(triton_kernels, bits) -> None:
    case = Case(torch.bfloat16, SECOND)
    how = case.prediction(0.5), bits, case.active(0)
    for kernel in (triton_kernels, torch_kernels):
        payload, encoded = case.encoded(kernel, *how)
        assert payload.numel() == 0 and torch.equal(encoded.reference, torch_kernels.predict(how[0]))
        assert torch.equal(kernel.decode(payload, *how, case.target, SECOND), encoded.reference)


def test_decode_writes_targets_of_any_strides(triton_kernels) -> None:
    case = Case(torch.bfloat16, FIRST)
    how = case.prediction(0.5), 2, None
    payload, encoded = case.encoded(torch_kernels, *how)
    for kernel in (triton_kernels, torch_kernels):
        across = torch.zeros(case.target.transpose(3, 4).shape, dtype=torch.bfloat16, device=DEVICE).transpose(3, 4)
        kernel.decode(payload, *how, across, FIRST)
        assert torch.equal(across[1:], encoded.reference) and not across[0].any()


@pytest.mark.parametrize(("bits", "bad"), in_turn([(8,), (2,), (1,)], [float("nan"), float("inf"), -float("inf")]))
def test_not_finite_values_affect_their_row_only_and_the_error_energy(triton_kernels, bad, bits) -> None:
    case = Case(torch.float32, None)
    case.values[1, 0, 2, 4, 3] = bad
    how = case.prediction(), bits, None
    found, plain = case.encoded(triton_kernels, *how), case.encoded(torch_kernels, *how)
    assert_equal_up_to_scales(case, found, plain, case.rows(bits), bits)
    assert not found[1].error_energy.isfinite()
    wrong = ~found[1].reference.isfinite().all(-1)
    assert wrong.sum() == 1 and wrong[1, 0, 2, 4]


@pytest.mark.parametrize(
    ("dtype", "local_slots", "bad"),
    in_turn(
        itertools.product([torch.float32, torch.bfloat16], [None, FIRST]), [float("nan"), float("inf"), -float("inf")]
    ),
)
def test_values_sent_unchanged_leave_a_finite_reference(triton_kernels, bad, local_slots, dtype) -> None:
    case = Case(dtype, local_slots)
    case.values[1, 0, 2, 4, 3] = bad
    expected = remote_slots(case.values, local_slots).nan_to_num(0.0, 0.0, 0.0)
    for kernel in (triton_kernels, torch_kernels):
        payload, encoded = case.encoded(kernel, None, None, None)
        assert torch.equal(encoded.reference, expected)
        assert torch.equal(kernel.decode(payload, None, None, None, case.target, local_slots), expected)
        received = remote_slots(case.target, local_slots)
        torch.testing.assert_close(received, remote_slots(case.values, local_slots), rtol=0, atol=0, equal_nan=True)


def test_zero_and_tiny_residuals_leave_the_reference(triton_kernels) -> None:
    case = Case(torch.float32, None)
    for values in (case.reference.clone(), case.reference + 1e-30):
        how = case.prediction(), 4, None
        found, plain = (case.encoded(kernel, *how, values=values) for kernel in (triton_kernels, torch_kernels))
        assert torch.equal(found[0], plain[0]) and torch.equal(found[1].reference, case.reference)
