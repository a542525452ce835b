"""The PyTorch backend of the kernels, for any device.

:mod:`xfuser_cocodiff.engine.kernels` documents the functions.
"""

from collections.abc import Sequence

import torch

from xfuser_cocodiff.engine.kernels.quantize import dequantize, level_bytes, quantize, tokens_per_row
from xfuser_cocodiff.engine.kernels.rows import (
    GAIN_BYTES,
    GAIN_STEPS,
    ActiveTokens,
    Base,
    EncodeResult,
    MessagePart,
    Prediction,
    remote_slots,
    sample_stride,
    view_bytes,
    write_remote_slots,
)

_TOKEN_DIM = 3


def predict(prediction: Prediction) -> torch.Tensor:
    """Return the values that both ends of a link predict, (L, G, H, T, D)."""
    if prediction.previous is None or prediction.gains is None:
        return prediction.reference
    gains = (prediction.gains / GAIN_STEPS).to(prediction.reference.dtype).view(-1, 1, 1, 1, 1)
    return (prediction.reference - prediction.previous).mul_(gains).add_(prediction.reference)


def scores(
    values: torch.Tensor, prediction: Prediction, local_slots: range | None, base: Base | None = None
) -> torch.Tensor:
    """Return the squared distance of each token from its prediction; see the package."""
    coded = _difference(remote_slots(values, local_slots), base)
    return (coded - predict(prediction)).float().square_().sum((2, 4))


def encode_all(parts: Sequence[MessagePart]) -> list[EncodeResult]:
    """Encode the tensors of a message and write their payloads; see the package."""
    return [encode(*part) for part in parts]


def decode_all(parts: Sequence[MessagePart]) -> list[torch.Tensor]:
    """Decode the payloads of a message into its targets and return the new link references; see the package."""
    return [
        decode(
            part.payload,
            part.prediction,
            part.bits,
            part.active,
            part.values,
            part.local_slots,
            part.sends_gain,
            part.base,
        )
        for part in parts
    ]


def encode(
    values: torch.Tensor,
    prediction: Prediction | None,
    bits: float | None,
    active: ActiveTokens | None,
    payload: torch.Tensor,
    local_slots: range | None,
    sends_gain: bool = False,
    base: Base | None = None,
) -> EncodeResult:
    """Encode values and write the payload; see the package."""
    values = remote_slots(values, local_slots)
    if prediction is None:
        write_remote_slots(_value_section(payload, values), values, local_slots)
        return EncodeResult(_finite_reference(values))
    if sends_gain and prediction.gains is not None:
        payload, gain_section = payload.tensor_split([-GAIN_BYTES], 1)
        write_remote_slots(gain_section, prediction.gains[:, None].expand(-1, GAIN_BYTES), local_slots)
    predicted, coded = predict(prediction), _difference(values, base)
    sent = _select(coded, active)
    if bits is None:
        write_remote_slots(_value_section(payload, sent), sent, local_slots)
    else:
        expected = _select(predicted, active)
        residual = torch.sub(sent, expected, out=torch.empty_like(expected))
        channels = _channels(prediction)
        packed, scales, decoded = quantize(_in_rows(_divide(residual, channels), bits, active), bits)
        sections = _encoded_sections(payload, expected, bits, active)
        for section, encoded in zip(sections, (packed, scales), strict=True):
            write_remote_slots(section, encoded, local_slots)
        sent = _add_residual(expected, decoded, channels)
    reference = _replace(predicted, sent, active, in_place=prediction.previous is not None)
    return EncodeResult(reference, energy(coded - reference), energy(values), _estimated_gains(coded, prediction))


def decode(
    payload: torch.Tensor,
    prediction: Prediction | None,
    bits: float | None,
    active: ActiveTokens | None,
    target: torch.Tensor,
    local_slots: range | None,
    sends_gain: bool = False,
    base: Base | None = None,
) -> torch.Tensor:
    """Decode a payload into the target and return the new link reference; see the package."""
    if prediction is None:
        received = remote_slots(_value_section(payload, target), local_slots)
        write_remote_slots(target, received, local_slots)
        return _finite_reference(received)
    if sends_gain:
        payload, gain_section = payload.tensor_split([-GAIN_BYTES], 1)
        prediction = prediction._replace(gains=remote_slots(gain_section, local_slots)[:, 0])
    predicted = predict(prediction)
    expected = _select(predicted, active)
    if bits is None:
        received = remote_slots(_value_section(payload, expected), local_slots)
    else:
        sections = _encoded_sections(payload, expected, bits, active)
        levels, scales = (remote_slots(section, local_slots) for section in sections)
        row_size = _in_rows(expected, bits, active).shape[-1]
        received = _add_residual(expected, dequantize(levels, scales, bits, row_size), _channels(prediction))
    reference = _replace(predicted, received, active, in_place=prediction.previous is not None)
    write_remote_slots(target, reference if base is None else _weighted(base).add_(reference), local_slots)
    return reference


def energy(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares, float32."""
    return torch.linalg.vector_norm(values, dtype=torch.float32).square_()


def _weighted(base: Base) -> torch.Tensor:
    """Return the values of a base times its weight, float32 (L, G, H, T, D), in memory of their own."""
    return base.values.to(torch.float32, copy=True).mul_(base.weight)


def _difference(values: torch.Tensor, base: Base | None) -> torch.Tensor:
    """Return the difference of values (L, G, H, T, D) to a base, computed in float32; the values without one."""
    return values if base is None else torch.sub(values, _weighted(base), out=torch.empty_like(values))


def _estimated_gains(values: torch.Tensor, prediction: Prediction) -> torch.Tensor | None:
    """Return the gain of each link that fits the current change to the previous one by least squares, uint8 (L)."""
    if prediction.previous is None:
        return None
    sample = slice(None, None, sample_stride(values.shape[_TOKEN_DIM]))
    tensors = (values, prediction.reference, prediction.previous)
    current, reference, previous = (tensor[:, :, :, sample].float() for tensor in tensors)
    change = reference - previous
    numerator = ((current - reference) * change).sum((1, 2, 3, 4))
    denominator = change.square().sum((1, 2, 3, 4))
    gains = (numerator / denominator * GAIN_STEPS).round_().nan_to_num_(0.0)
    return gains.clamp_(0, GAIN_STEPS).to(torch.uint8)


def _finite_reference(values: torch.Tensor) -> torch.Tensor:
    """Return the reference for values that were sent unchanged: zeros replace values that are not finite."""
    return torch.nan_to_num(values, 0.0, 0.0, 0.0).contiguous()


def _value_section(payload: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a view of a payload (P, n) as values of the shape (P, ...) and the type of `like`."""
    return view_bytes(payload, like.dtype).view(len(payload), *like.shape[1:])


def _in_rows(values: torch.Tensor, bits: float, active: ActiveTokens | None) -> torch.Tensor:
    """Return values (L, G, H, T, D) as rows that share a scale, (L, rows, values per row)."""
    tokens, dim = values.shape[_TOKEN_DIM:]
    row_tokens = tokens_per_row(bits, dim, tokens, active is None)
    rows = values.shape[1:_TOKEN_DIM].numel() * tokens // row_tokens
    return values.reshape(len(values), rows, row_tokens * dim)


def _encoded_sections(
    payload: torch.Tensor, like: torch.Tensor, bits: float, active: ActiveTokens | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of a payload (P, n): its levels (P, bytes) and scales (P, rows, 1).

    Args:
        payload: the bytes.
        like: values (L, G, H, T, D) of the shape that is encoded.
        bits: bits per value.
        active: tokens that are sent; None for all.
    """
    _, rows, size = _in_rows(like, bits, active).shape
    levels, scales = payload.split([level_bytes(bits, rows, size), rows], 1)
    return levels, scales[..., None]


def _channels(prediction: Prediction) -> torch.Tensor | None:
    """Return the scales of channels, float32 (L, 1, H, 1, D); None for ones."""
    return None if prediction.channel_scales is None else prediction.channel_scales[:, None, :, None]


def _divide(residual: torch.Tensor, channels: torch.Tensor | None) -> torch.Tensor:
    """Return the residual divided by the scales of channels."""
    return residual if channels is None else residual.float() / channels


def _add_residual(predicted: torch.Tensor, residual: torch.Tensor, channels: torch.Tensor | None) -> torch.Tensor:
    """Return prediction plus decoded residual, which is given in rows, rounded to the type of the prediction."""
    residual = residual.view(predicted.shape)
    if channels is not None:
        residual.mul_(channels)
    return residual.add_(predicted).to(predicted.dtype)


def _select(values: torch.Tensor, active: ActiveTokens | None) -> torch.Tensor:
    """Return the active tokens of values (L, G, H, T, D)."""
    if active is None:
        return values
    selected = values.flatten(0, _TOKEN_DIM).index_select(0, _row_indices(active, values))
    return selected.view(*values.shape[:_TOKEN_DIM], active.count, values.shape[-1])


def _replace(values: torch.Tensor, tokens: torch.Tensor, active: ActiveTokens | None, in_place: bool) -> torch.Tensor:
    """Return values with their active tokens replaced; `in_place` if nothing else uses the values."""
    if active is None:
        return tokens
    rows, index = values.flatten(0, _TOKEN_DIM), _row_indices(active, values)
    copy = rows.index_copy_ if in_place else rows.index_copy
    return copy(0, index, tokens.flatten(0, _TOKEN_DIM)).view(values.shape)


def _row_indices(active: ActiveTokens, values: torch.Tensor) -> torch.Tensor:
    """Return the indices of active tokens among all rows of D values, which copy much faster than single values."""
    links, groups, heads, tokens, _ = values.shape
    starts = torch.arange(0, links * groups * heads * tokens, tokens, device=values.device)
    return (starts.view(links, groups, heads, 1) + active.indices[:, :, None]).flatten()
