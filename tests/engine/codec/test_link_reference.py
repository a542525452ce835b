"""Predictor state of one end of a link, from step to step."""

import pytest
import torch

from xfuser_cocodiff.engine.codec.active_tokens import select_tokens
from xfuser_cocodiff.engine.codec.codec import EXACT, Codec
from xfuser_cocodiff.engine.codec.coded_tensor import CodedTensor, encode
from xfuser_cocodiff.engine.codec.link_reference import LinkReference
from xfuser_cocodiff.engine.codec.rows import GAIN_STEPS, Int8Rows
from xfuser_cocodiff.engine.codec.torch_kernels import predict

SHAPE = 1, 1, 1, 8, 16


def advance(reference: LinkReference, value: float, is_difference: bool) -> None:
    """Replace the reference by a constant, as a kernel would."""
    values = torch.full(SHAPE, value)
    reference.advance_rows(Int8Rows.of(values), SHAPE, values.dtype, keeps_previous=True, is_difference=is_difference)


def extrapolated(reference: LinkReference) -> float:
    """Return the value that the reference predicts where it goes on as before; values are constant."""
    reference.gains = torch.tensor([GAIN_STEPS], dtype=torch.uint8)
    [value] = predict(reference.prediction(predicts=True)).unique().tolist()
    return value


def test_values_before_are_dropped_where_a_difference_is_coded() -> None:
    """A reference of a tensor and one of its difference to the leading branch do not extrapolate each other."""
    reference = LinkReference()
    found = []
    for value, is_difference in ((1.0, False), (3.0, False), (4.0, True), (5.0, True)):
        advance(reference, value, is_difference)
        found.append(extrapolated(reference))
    assert found == pytest.approx([1.0, 5.0, 4.0, 6.0], rel=0.02)


def test_change_is_that_since_a_lossless_step() -> None:
    reference, codec = LinkReference(is_exact=True), Codec(token_fraction=1 / 8)

    def sent_tokens(values: torch.Tensor, codec: Codec) -> list[int]:
        active = select_tokens(values, reference, codec) if codec.selects_tokens else None
        payload = torch.empty(1, codec.payload_bytes(SHAPE, values.dtype), dtype=torch.uint8)
        encode([CodedTensor(values, reference, codec, active, payload)], torch.empty(1, 2))
        return active.indices.flatten().tolist() if active else []

    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    sent = [sent_tokens(values, EXACT)]
    for token, change, of_step in ((1, 0.5, codec), (2, 9.0, EXACT), (3, 0.5, codec)):
        values = values.clone()
        values[:, :, :, token] += change
        sent.append(sent_tokens(values, of_step))
    assert sent == [[], [1], [], [3]]  # not token 2, which the lossless step has sent
