"""The PyTorch backend of the kernels, for any device.

:mod:`kernels` documents the functions. All arithmetic is in float32.
"""

from collections.abc import Sequence

import torch

from xfuser_cocodiff.engine.codec.codec import TOKEN_DIM
from xfuser_cocodiff.engine.codec.quantize import dequantize, quantize
from xfuser_cocodiff.engine.codec.rows import (
    GAIN_BYTES,
    GAIN_STEPS,
    MessagePart,
    PayloadLayout,
    Prediction,
    in_rows,
    link_shape,
    remote_slots,
    rows_of,
    sample_stride,
    write_remote_slots,
)


def predict(prediction: Prediction) -> torch.Tensor | None:
    """Return the values that both ends of a link predict, float32 (L, R, N); None for zeros."""
    if prediction.reference is None:
        return None
    reference = prediction.reference.values
    if prediction.previous is None or prediction.gains is None:
        return reference
    gains = (prediction.gains / GAIN_STEPS).view(-1, 1, 1)
    return (reference - prediction.previous.values).mul_(gains).add_(reference)


def encode(parts: Sequence[MessagePart], energies: torch.Tensor) -> None:
    """Encode the tensors of a message and write their payloads; see :mod:`kernels`."""
    for part, of_part in zip(parts, energies, strict=True):
        _encode(part, of_part)


def decode(parts: Sequence[MessagePart]) -> None:
    """Decode the payloads of a message into its targets; see :mod:`kernels`."""
    for part in parts:
        _decode(part)


def _encode(part: MessagePart, energies: torch.Tensor) -> None:
    values, prediction = remote_slots(part.values, part.local_slots), part.prediction
    levels, scales, gain = _sections(part)
    if prediction.gains is not None:
        write_remote_slots(gain, prediction.gains[:, None].expand(-1, GAIN_BYTES), part.local_slots)
    exact = in_rows(values).float()
    coded = exact if part.base is None else exact - in_rows(part.base).float()
    predicted = predict(prediction)
    packed, codes, decoded = quantize(coded if predicted is None else coded - predicted, part.bits)
    write_remote_slots(levels, packed, part.local_slots)
    write_remote_slots(scales, codes, part.local_slots)
    decoded = _add(decoded, predicted)
    _estimate_gains(coded, prediction, values.shape)
    part.new_reference.write(decoded)
    energies[0], energies[1] = energy(coded - decoded), energy(exact)


def _decode(part: MessagePart) -> None:
    prediction, target = part.prediction, part.values
    shape = link_shape(target, part.local_slots)
    levels, scales, gain = (remote_slots(section, part.local_slots) for section in _sections(part))
    if part.sends_gain:
        prediction = prediction._replace(gains=gain[:, 0])
    residual = dequantize(levels, scales, part.bits, rows_of(shape)[1])
    decoded = _add(residual, predict(prediction))
    received = decoded if part.base is None else in_rows(part.base).float() + decoded
    write_remote_slots(target, received.reshape(shape), part.local_slots)
    part.new_reference.write(decoded)


def energy(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares, float32."""
    return torch.linalg.vector_norm(values, dtype=torch.float32).square_()


def _estimate_gains(coded: torch.Tensor, prediction: Prediction, shape: Sequence[int]) -> None:
    """Replace the gain of each link by that which fits the current change to the previous one by least squares."""
    if prediction.reference is None or prediction.previous is None or prediction.gains is None:
        return
    sample = slice(None, None, sample_stride(shape[TOKEN_DIM]))
    tensors = coded, prediction.reference.values, prediction.previous.values
    current, reference, previous = (each.reshape(shape)[:, :, :, sample] for each in tensors)
    change = reference - previous
    numerator = ((current - reference) * change).sum((1, 2, 3, 4))
    gains = (numerator / change.square().sum((1, 2, 3, 4)) * GAIN_STEPS).add_(0.5).floor_().nan_to_num_(0.0)
    prediction.gains.copy_(gains.clamp_(0, GAIN_STEPS))


def _sections(part: MessagePart) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views of a payload (P, n): its levels (P, bytes), scales (P, R, 1) and gain (P, GAIN_BYTES or 0)."""
    layout = PayloadLayout.of(part.bits, *rows_of(part.values.shape), part.sends_gain)
    levels, scales, gain = part.payload.tensor_split([layout.scales, layout.gain], 1)
    return levels, scales[..., None], gain


def _add(residual: torch.Tensor, predicted: torch.Tensor | None) -> torch.Tensor:
    """Return a decoded residual plus the prediction, (L, R, N)."""
    return residual if predicted is None else residual.add_(predicted)
