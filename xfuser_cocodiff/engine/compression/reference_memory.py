"""Memory of link references, and what a memory budget changes.

Both ends of a slow link store the values that crossed it last, and with extrapolation those of the step before. Where
branches of guidance are coded together, the sender also keeps the values of the leading one. A budget is met in two
ways: without extrapolation, and if references still do not fit, the layers that are called last in a step have none and
send 8 bits at each step. Layers save in proportion to their references, so their order decides. No forecast is needed:
each layer reserves memory at its first call, for all references that it is going to have.

The default budget is what a rank can allocate when the first layer of a run asks, less a reserve. By then the weights
and the inputs are there, and the reserve is for what comes: activations, buffers, what other libraries load.
"""

from fractions import Fraction
from typing import NamedTuple

import torch

from xfuser_cocodiff.engine.codec.quantize import tokens_per_row
from xfuser_cocodiff.engine.compression.modes import CodecSchedule
from xfuser_cocodiff.engine.topology.device_memory import DeviceMemory

GIB = 2**30
_RESERVED_LAYERS = 12
"""Reserve in bytes of Q, K, V and O of a layer. A step allocates up to 8.7 of them after its first layer asks: counted
over FLUX.1, FLUX.2, SD3.5, Qwen-Image, HunyuanVideo and Wan2.1 on 8 and 16 ranks, coded, in eager mode."""
_RESERVED_PART = 1 / 16
"""Least reserve, as a part of the device: for communicators and kernels that load later, and for fragmentation."""


class LayerSizes(NamedTuple):
    """Sizes of a layer's Q, K, V and O on one rank in one call."""

    num_values: int
    """Number of values in Q, K, V and O."""
    num_v_values: int
    """Number of values in V."""
    row_values: int
    """Values that share a code in a reference: head dim D, or several tokens where D is small."""
    value_bytes: int
    """Bytes per value."""

    @classmethod
    def of(
        cls,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        fraction: Fraction = Fraction(1),
    ) -> "LayerSizes":
        """Return the sizes of tensors (B, H, S, D).

        Args:
            query: Q; O has the same shape.
            key: K, perhaps of other tokens than Q.
            value: V.
            fraction: fraction of the values that counts, for a rank that computes for several virtual ranks.
        """
        num_values = 2 * query.numel() + key.numel() + value.numel()
        tokens, dim = value.shape[-2:]
        row_values = dim * tokens_per_row(dim, tokens)
        return cls(int(num_values * fraction), int(value.numel() * fraction), row_values, value.element_size())

    def crossing(self, num_slow: int) -> "LayerSizes":
        """Return the sizes of what crosses slow axes with `num_slow` coordinates."""
        return self._replace(
            num_values=self.num_values * (num_slow - 1) // num_slow,
            num_v_values=self.num_v_values * (num_slow - 1) // num_slow,
        )

    def slow_axis_bytes(self, num_slow: int, num_gathered: int) -> int:
        """Return the bytes that this rank sends across slow axes without codecs.

        Args:
            num_slow: coordinates on the slow axes of all-to-alls.
            num_gathered: coordinates on the slow axes along which K and V are gathered, as in a ring.
        """
        return (self.crossing(num_slow).num_values + 2 * self.num_v_values * (num_gathered - 1)) * self.value_bytes


def default_budget(memory: DeviceMemory, sizes: LayerSizes, has_known_end: bool) -> float:
    """Return the bytes that link references may take without --cocodiff_memory_budget; negative if memory is short.

    Args:
        memory: memory of the device when the first layer of a run asks.
        sizes: sizes of this layer.
        has_known_end: whether references are dropped before the VAE decodes. A run without a known number of steps may
            keep them, and leaves half of the memory.
    """
    reserve = max(_RESERVED_LAYERS * sizes.num_values * sizes.value_bytes, _RESERVED_PART * memory.total)
    return (memory.free - reserve) / (1 if has_known_end else 2)


class ReferenceBytes(NamedTuple):
    """Memory of the link references of a layer on a rank, in one branch."""

    predicted: int
    """Bytes with the references of the step before, which predictions need."""
    single: int
    """Bytes without them."""

    @classmethod
    def of(
        cls,
        sizes: LayerSizes,
        schedule: CodecSchedule,
        num_slow: int,
        num_gathered: int = 1,
        keeps_values: bool = False,
    ) -> "ReferenceBytes":
        """Return the memory for a layer.

        In an all-to-all, a rank sends as much as it receives and has references of both. In an all-gather it has
        references of its own K and V, and of those of one rank at each other coordinate of the slow axes.

        Args:
            sizes: sizes of the layer's tensors on this rank.
            schedule: codec schedule of the run.
            num_slow: coordinates on the slow axes of all-to-alls.
            num_gathered: coordinates on the slow axes along which K and V are gathered, as in a ring.
            keeps_values: whether the leading branch's values, of the same sizes, are kept for this one.
        """
        crossing, is_gathered = sizes.crossing(num_slow), num_gathered > 1
        gathered = 2 * sizes.num_v_values * num_gathered if is_gathered else 0
        num_values = 2 * crossing.num_values + gathered
        if schedule.cached:  # V-Major stores values as they are, and those that it compares with
            num_scored = crossing.num_v_values + (sizes.num_v_values if is_gathered else 0)
            return cls(*[(num_values + num_scored) * sizes.value_bytes] * 2)
        single = num_values + num_values // sizes.row_values
        kept = (crossing.num_values + 2 * is_gathered * sizes.num_v_values) * sizes.value_bytes * keeps_values
        return cls((2 if schedule.predictor else 1) * single + kept, single + kept)
