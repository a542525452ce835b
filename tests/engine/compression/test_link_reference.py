"""Predictor state of one end of a link, from step to step."""

import torch

from xfuser_cocodiff.engine.compression.active_tokens import select_tokens
from xfuser_cocodiff.engine.compression.codec import CHANGE, EXACT, Codec
from xfuser_cocodiff.engine.compression.codecs import CodedTensor, encode
from xfuser_cocodiff.engine.compression.link_reference import LinkReference

SHAPE = 1, 1, 1, 8, 16


def constant(value: float) -> torch.Tensor:
    return torch.full(SHAPE, value)


def test_values_before_are_dropped_where_another_difference_is_coded() -> None:
    """A reference of a tensor and one of its difference to the leading branch do not extrapolate each other."""
    reference = LinkReference()
    for value in (1.0, 3.0):
        reference.advance(constant(value), keeps_previous=True)
    assert torch.equal(reference.predict(1.0), constant(5.0))
    reference.advance(constant(4.0), keeps_previous=True, weight=0.5)
    assert torch.equal(reference.predict(1.0), constant(4.0))
    reference.advance(constant(5.0), keeps_previous=True, weight=0.5)
    assert torch.equal(reference.predict(1.0), constant(6.0))


def test_change_is_that_since_a_lossless_step() -> None:
    reference, codec = LinkReference(), Codec(bits=4, token_fraction=1 / 8, score=CHANGE)

    def sent_tokens(values: torch.Tensor, codec: Codec) -> list[int]:
        active = select_tokens(values, reference, codec, seed=0) if codec.selects_tokens else None
        payload = torch.empty(1, codec.payload_bytes(SHAPE, values.dtype), dtype=torch.uint8)
        encode([CodedTensor(values, reference, codec, active, payload)])
        return active.indices.flatten().tolist() if active else []

    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    sent = [sent_tokens(values, EXACT)]
    for token, change, of_step in ((1, 0.5, codec), (2, 9.0, EXACT), (3, 0.5, codec)):
        values = values.clone()
        values[:, :, :, token] += change
        sent.append(sent_tokens(values, of_step))
    assert sent == [[], [1], [], [3]]  # not token 2, which the lossless step has sent
