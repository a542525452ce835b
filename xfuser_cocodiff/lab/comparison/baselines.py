"""Compression rules of other systems on virtual ranks, to evaluate them like the plugin's codecs."""

from collections.abc import Sequence

import torch

from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs
from xfuser_cocodiff.engine.compression.virtual_ranks import VirtualRanks

_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max
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
        for tensor in tensors:
            layer_codecs.stats.exact_bytes += tensor.nbytes
            layer_codecs.stats.sent_bytes += tensor.numel()
        return [
            rotate(_round_to_fp8(rotate(tensor))) if name in "qk" else _round_to_fp8(tensor)
            for name, tensor in zip(names, tensors, strict=True)
        ]


def rotate(values: torch.Tensor) -> torch.Tensor:
    """Multiply rows (..., D) by a Hadamard matrix, which is its own inverse.

    Rows are returned unchanged if D has no power-of-two block that divides it.
    """
    size = min(_BLOCK, values.shape[-1])
    if size & (size - 1) or values.shape[-1] % size:
        return values
    matrix = values.new_ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(matrix.new_tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return (values.unflatten(-1, (-1, size)) @ (matrix * size**-0.5)).flatten(-2)


def _round_to_fp8(values: torch.Tensor) -> torch.Tensor:
    """Quantize values to FP8 with one scale and dequantize them."""
    scale = values.float().abs().amax().clamp(min=1e-6) / (_LARGEST * _HEADROOM)
    return ((values.float() / scale).clamp(-_LARGEST, _LARGEST).to(_FP8).float() * scale).to(values.dtype)
