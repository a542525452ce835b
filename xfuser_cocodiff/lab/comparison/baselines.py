"""Rules of other systems in the place of codecs, on virtual ranks, so that all are judged alike."""

from collections.abc import Sequence

import torch

from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs
from xfuser_cocodiff.engine.compression.virtual_ranks import VirtualRanks

_FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FP8).max
_SAFETY = 0.85
"""xDiT's: of the largest number of FP8, to which the largest value is mapped."""
_BLOCK = 128
"""Values that are rotated together, at most."""


class Fp8(VirtualRanks):
    """xDiT's `--use_fp8_comms`: every value as an FP8 number, by a scale for a tensor of a layer. Q and K are rotated
    before. xDiT takes the scale from a run before, here it is of the tensor at hand; what stays on a rank goes the same
    way, as it does there. That attention then runs in FP8 too is left out."""

    def transmit(
        self, names: str, tensors: Sequence[torch.Tensor], segments: Sequence[int], layer_codecs: LayerCodecs
    ) -> list:
        """See :class:`VirtualRanks`."""
        for tensor in tensors:
            layer_codecs.stats.exact_bytes += tensor.nbytes
            layer_codecs.stats.sent_bytes += tensor.numel()
        return [
            rotated(_cast(rotated(tensor))) if name in "qk" else _cast(tensor)
            for name, tensor in zip(names, tensors, strict=True)
        ]


def rotated(values: torch.Tensor) -> torch.Tensor:
    """Rows (..., D) by Hadamard's matrix, which is its own inverse; as they are where D has none."""
    size = min(_BLOCK, values.shape[-1])
    if size & (size - 1) or values.shape[-1] % size:
        return values
    matrix = values.new_ones(1, 1)
    while len(matrix) < size:
        matrix = torch.kron(matrix.new_tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return (values.unflatten(-1, (-1, size)) @ (matrix * size**-0.5)).flatten(-2)


def _cast(values: torch.Tensor) -> torch.Tensor:
    """What FP8 leaves of them."""
    scale = values.float().abs().amax().clamp(min=1e-6) / (_LARGEST * _SAFETY)
    return ((values.float() / scale).clamp(-_LARGEST, _LARGEST).to(_FP8).float() * scale).to(values.dtype)
