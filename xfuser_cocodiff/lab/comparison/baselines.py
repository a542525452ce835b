"""Compression rules of other systems on virtual ranks, to evaluate them like the plugin's codecs."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from xfuser_cocodiff.engine.codec.torch_kernels import energy
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs
from xfuser_cocodiff.engine.compression.step_errors import TensorError
from xfuser_cocodiff.lab.comparison import row_codes
from xfuser_cocodiff.lab.comparison.row_codes import RowCode
from xfuser_cocodiff.lab.comparison.virtual_ranks import VirtualRanks

_HEADROOM = 0.85
"""xDiT's factor: the largest value of a tensor is mapped to this fraction of the largest FP8 number."""
_BLOCK = 128
"""Largest number of values that are rotated together."""


class Fp8(VirtualRanks):
    """xDiT's `--use_fp8_comms`: FP8 values with one scale per tensor and layer, Q and K rotated before.

    It differs from xDiT in two ways: the scale is that of the current tensor, not of the previous run, and attention
    itself does not run in FP8. As in xDiT, values that stay on a rank are quantized too.
    """

    def transmit(
        self, names: str, tensors: Sequence[torch.Tensor], segments: Sequence[int], layer_codecs: LayerCodecs
    ) -> list:
        """See :class:`VirtualRanks`."""
        received = []
        for name, tensor in zip(names, tensors, strict=True):
            layer_codecs.stats.exact_bytes += tensor.nbytes
            layer_codecs.stats.sent_bytes += tensor.numel()
            received.append(rotate(_round_to_fp8(rotate(tensor))) if name in "qk" else _round_to_fp8(tensor))
            _note_error(layer_codecs, name, tensor, received[-1])
        return received


class CodedRows(VirtualRanks):
    """Rows by a stateless code, of all tensors that have one; values that stay on a rank are quantized too."""

    codes: ClassVar[Mapping[str, RowCode]]
    """Codes by letter of the tensor."""

    def transmit(
        self, names: str, tensors: Sequence[torch.Tensor], segments: Sequence[int], layer_codecs: LayerCodecs
    ) -> list:
        """See :class:`VirtualRanks`."""
        received = []
        for name, tensor in zip(names, tensors, strict=True):
            layer_codecs.stats.exact_bytes += tensor.nbytes
            if code := self.codes.get(name):
                rows, dim = tensor.numel() // tensor.shape[-1], tensor.shape[-1]
                layer_codecs.stats.sent_bytes += rows * code.row_bytes(dim)
                received.append(code.round_trip(tensor, self.statistic(name, tensor)))
                _note_error(layer_codecs, name, tensor, received[-1])
            else:
                layer_codecs.stats.sent_bytes += tensor.nbytes
                received.append(tensor)
        return received

    def statistic(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the statistic (B, H, 1, D) that the code of a tensor (B, H, N, D) needs."""
        return None


class RowFp8(CodedRows):
    """cache-dit's `ulysses_float8`: Q, V and O as FP8 rows with a scale each, K as it is."""

    codes: ClassVar = {"q": row_codes.ROW_FP8, "v": row_codes.ROW_FP8, "o": row_codes.ROW_FP8_HALF}


class Fp4(CodedRows):
    """LightX2V's FP4 communication: Q, K, V and O as FP4 with a scale of 16 values each."""

    codes: ClassVar = dict.fromkeys("qkvo", row_codes.FP4)


class Int8(CodedRows):
    """FlashInfer's Q and K as INT8 rows, K minus its mean over all tokens, and V as FP8 with a scale of each channel.

    SageAttention2, which it sends for, has scales of larger groups.
    """

    codes: ClassVar = {"q": row_codes.INT8, "k": row_codes.INT8, "v": row_codes.STATIC_FP8}

    def statistic(self, name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the mean of K, or the scale of V, by channel."""
        if name == "k":
            return tensor.float().mean(2, keepdim=True)
        if name == "v":
            return tensor.float().abs().amax(2, keepdim=True).clamp(min=1e-6) / row_codes.FP8_LARGEST
        return None


def rotate(values: torch.Tensor, matrix: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply rows (..., D) by a Hadamard matrix, which is its own inverse.

    Rows are returned unchanged if D has no power-of-two block that divides it.

    Args:
        values: rows.
        matrix: :func:`hadamard` of these rows, to save the time to make it.
    """
    matrix = hadamard(values) if matrix is None else matrix
    if values.shape[-1] % len(matrix):
        return values
    return (values.unflatten(-1, (-1, len(matrix))) @ matrix).flatten(-2)


def hadamard(values: torch.Tensor) -> torch.Tensor:
    """Return the orthonormal Hadamard matrix for rows (..., D), of at most 128 x 128; 1 x 1 if there is none."""
    size = min(_BLOCK, values.shape[-1])
    if size & (size - 1):
        return values.new_ones(1, 1)
    pair, matrix = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(pair, matrix)
    return (matrix * size**-0.5).to(values)


def _note_error(layer_codecs: LayerCodecs, name: str, sent: torch.Tensor, received: torch.Tensor) -> None:
    """Add the error of a tensor to the step's statistics."""
    energies = layer_codecs.errors.add([TensorError(name, layer_codecs.layer)], sent.device)
    energies[0, 0], energies[0, 1] = energy(received.float() - sent.float()), energy(sent)


def _round_to_fp8(values: torch.Tensor) -> torch.Tensor:
    """Quantize values to FP8 with one scale and dequantize them."""
    scale = values.float().abs().amax().clamp(min=1e-6) / (row_codes.FP8_LARGEST * _HEADROOM)
    return row_codes.STATIC_FP8.round_trip(values, scale)
