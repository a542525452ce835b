"""Provides the kinds of layers of diffusion transformers: their linear layers and pointwise kernels.

FLOPs follow from the linear layers. Pointwise kernels are counted in diffusers' blocks, whose code xDiT runs in eager
mode; tests compare both with the real modules.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from xfuser_cocodiff.lab.accelerator.accelerators import Accelerator

BYTES_PER_VALUE = 2
"""Bytes of a value in bf16."""
IMAGE, TEXT, JOINT, CROSS_TEXT, ROW = "image", "text", "joint", "cross-attended text", "row"
"""What a kernel processes: tokens of one stream or of both, text outside of the sequence, or one vector per batch row
(modulation)."""


class Linear(NamedTuple):
    """A linear layer; features are in widths of the model."""

    tokens: str
    inputs: float = 1
    outputs: float = 1


class Pointwise(NamedTuple):
    """Pointwise kernels that run one after the other: norms, modulation, RoPE, activations, residuals."""

    tokens: str
    kernels: int
    passes: float
    """Reads and writes of all kernels together, in tensors of shape (tokens, width) in bf16."""


@dataclass(frozen=True)
class Work:
    """Part of a layer's computation."""

    linear: tuple[Linear, ...] = ()
    pointwise: tuple[Pointwise, ...] = ()

    @property
    def kernels(self) -> int:
        """Number of kernel launches."""
        return len(self.linear) + sum(each.kernels for each in self.pointwise)

    def flops(self, counts: Mapping[str, float], width: int) -> float:
        """Return the FLOPs of the linear layers.

        Args:
            counts: number of tokens by kind, over all batch rows.
            width: channels of a token.
        """
        return sum(2.0 * counts[each.tokens] * each.inputs * each.outputs * width**2 for each in self.linear)

    def seconds(self, counts: Mapping[str, float], width: int, accelerator: Accelerator) -> float:
        """Return the time on the device; for the arguments see :meth:`flops`."""
        total = 0.0
        for each in self.linear:
            values = counts[each.tokens] * (each.inputs + each.outputs) * width
            weights = each.inputs * each.outputs * width**2
            flops = 2.0 * counts[each.tokens] * weights
            total += accelerator.kernel_seconds(BYTES_PER_VALUE * (values + weights), matmul_flops=flops)
        for tokens, kernels, passes in self.pointwise:
            moved = BYTES_PER_VALUE * passes * counts[tokens] * width
            total += kernels * accelerator.kernel_seconds(moved / kernels)
        return total


_NOTHING = Work()


@dataclass(frozen=True)
class LayerKind:
    """Layers that cost the same. The reordering around all-to-alls is not part of them."""

    name: str
    count: int
    """Number of layers."""
    query_key: Work
    """Projections, norms and RoPE of Q and K, which V does not need."""
    rest: Work
    """All else, without attention."""
    parallel: Work = _NOTHING
    """MLP parallel to attention, which the plugin defers until Q, K and V are in flight."""
    has_cross_attention: bool = False
    """Whether a second attention, without all-to-alls, attends to the text."""

    @property
    def kernels(self) -> int:
        """Number of kernel launches."""
        return sum(work.kernels for work in self.parts) + 1 + self.has_cross_attention

    @property
    def parts(self) -> tuple[Work, Work, Work]:
        """All parts."""
        return self.query_key, self.rest, self.parallel


def double_stream(
    count: int,
    own_norms: tuple[Pointwise, ...],
    mlp: tuple[float, float] = (4, 4),
    mlp_pointwise: tuple[int, float] = (8, 24),
    own_modulation: bool = True,
) -> LayerKind:
    """Return layers with separate weights for image and text, which attend together.

    Args:
        count: number of layers.
        own_norms: norms and RoPE of Q and K.
        mlp: outputs of the MLP's first linear layer and inputs of its second, in widths.
        mlp_pointwise: kernels and passes of a stream after attention.
        own_modulation: whether the layer projects its modulation itself.
    """
    linear, pointwise = [], [Pointwise(ROW, 6, 12) if own_modulation else Pointwise(ROW, 4, 8)]
    for stream in (IMAGE, TEXT):
        linear += [Linear(ROW, 1, 6)] if own_modulation else []
        linear += [Linear(stream), Linear(stream), Linear(stream, 1, mlp[0]), Linear(stream, mlp[1], 1)]
        pointwise += [Pointwise(stream, 3, 6), Pointwise(stream, *mlp_pointwise)]
    pointwise += [Pointwise(JOINT, 1, 2)]  # V of both streams, concatenated
    query_key = Work(tuple(Linear(stream) for stream in (IMAGE, IMAGE, TEXT, TEXT)), own_norms)
    return LayerKind("double", count, query_key, Work(tuple(linear), tuple(pointwise)))


def single_stream(
    count: int, own_norms: tuple[Pointwise, ...], before: tuple[int, float], after: tuple[int, float]
) -> LayerKind:
    """Return layers with the same weights for image and text, and an MLP parallel to attention.

    Args:
        count: number of layers.
        own_norms: norms and RoPE of Q and K.
        before: kernels and passes before attention, without those and the MLP's.
        after: kernels and passes after attention.
    """
    rest = Work(
        (Linear(ROW, 1, 3), Linear(JOINT), Linear(JOINT, 5, 1)),
        (Pointwise(ROW, 2, 4), Pointwise(JOINT, *before), Pointwise(JOINT, *after)),
    )
    parallel = Work((Linear(JOINT, 1, 4),), (Pointwise(JOINT, 1, 8),))
    return LayerKind("single", count, Work((Linear(JOINT),) * 2, own_norms), rest, parallel)
