"""The PyTorch backend of the kernels, for any device.

:mod:`xfuser_cocodiff.engine.codec` documents the functions. All arithmetic is in float32.
"""

from collections.abc import Sequence

import torch

from xfuser_cocodiff.engine.codec.quantize import dequantize, level_bytes, quantize
from xfuser_cocodiff.engine.codec.rows import (
    GAIN_BYTES,
    GAIN_STEPS,
    EncodeResult,
    Int8Rows,
    MessagePart,
    Prediction,
    in_rows,
    num_links,
    remote_slots,
    rows_of,
    sample_stride,
    write_remote_slots,
)

_TOKEN_DIM = 3


def predict(prediction: Prediction) -> torch.Tensor | None:
    """Return the values that both ends of a link predict, float32 (L, R, N); None for zeros."""
    if prediction.reference is None:
        return None
    reference = prediction.reference.values
    if prediction.previous is None or prediction.gains is None:
        return reference
    gains = (prediction.gains / GAIN_STEPS).view(-1, 1, 1)
    return (reference - prediction.previous.values).mul_(gains).add_(reference)


def encode(parts: Sequence[MessagePart]) -> list[EncodeResult]:
    """Encode the tensors of a message and write their payloads; see the package."""
    return [_encode(part) for part in parts]


def decode(parts: Sequence[MessagePart]) -> list[Int8Rows]:
    """Decode the payloads of a message into its targets and return the new link references; see the package."""
    return [_decode(part) for part in parts]


def _encode(part: MessagePart) -> EncodeResult:
    values, prediction, payload = remote_slots(part.values, part.local_slots), part.prediction, part.payload
    if part.sends_gain and prediction.gains is not None:
        payload, gain_section = payload.tensor_split([-GAIN_BYTES], 1)
        write_remote_slots(gain_section, prediction.gains[:, None].expand(-1, GAIN_BYTES), part.local_slots)
    exact = in_rows(values).float()
    coded = exact if part.base is None else exact - in_rows(part.base).float()
    predicted = predict(prediction)
    packed, scales, decoded = quantize(coded if predicted is None else coded - predicted, part.bits)
    for section, encoded in zip(_sections(payload, part), (packed, scales), strict=True):
        write_remote_slots(section, encoded, part.local_slots)
    decoded = _add(decoded, predicted)
    gains = _estimated_gains(coded, prediction, values.shape)
    return EncodeResult(Int8Rows.of_rows(decoded), energy(coded - decoded), energy(exact), gains)


def _decode(part: MessagePart) -> Int8Rows:
    prediction, payload, target = part.prediction, part.payload, part.values
    shape = num_links(len(target), part.local_slots), *target.shape[1:]
    if part.sends_gain:
        payload, gain_section = payload.tensor_split([-GAIN_BYTES], 1)
        prediction = prediction._replace(gains=remote_slots(gain_section, part.local_slots)[:, 0])
    levels, scales = (remote_slots(section, part.local_slots) for section in _sections(payload, part))
    residual = dequantize(levels, scales, part.bits, rows_of(shape)[1])
    decoded = _add(residual, predict(prediction))
    received = decoded if part.base is None else in_rows(part.base).float() + decoded
    write_remote_slots(target, received.reshape(shape), part.local_slots)
    return Int8Rows.of_rows(decoded)


def energy(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares, float32."""
    return torch.linalg.vector_norm(values, dtype=torch.float32).square_()


def _estimated_gains(coded: torch.Tensor, prediction: Prediction, shape: Sequence[int]) -> torch.Tensor | None:
    """Return the gain of each link that fits the current change to the previous one by least squares, uint8 (L)."""
    if prediction.reference is None or prediction.previous is None:
        return None
    sample = slice(None, None, sample_stride(shape[_TOKEN_DIM]))
    tensors = coded, prediction.reference.values, prediction.previous.values
    current, reference, previous = (each.reshape(shape)[:, :, :, sample] for each in tensors)
    change = reference - previous
    numerator = ((current - reference) * change).sum((1, 2, 3, 4))
    gains = (numerator / change.square().sum((1, 2, 3, 4)) * GAIN_STEPS).add_(0.5).floor_().nan_to_num_(0.0)
    return gains.clamp_(0, GAIN_STEPS).to(torch.uint8)


def _sections(payload: torch.Tensor, part: MessagePart) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of a payload (P, n): its levels (P, bytes) and scales (P, R, 1)."""
    rows, size = rows_of(part.values.shape)
    levels, scales = payload.split([level_bytes(part.bits, rows, size), rows], 1)
    return levels, scales[..., None]


def _add(residual: torch.Tensor, predicted: torch.Tensor | None) -> torch.Tensor:
    """Return a decoded residual plus the prediction, (L, R, N)."""
    return residual if predicted is None else residual.add_(predicted)
