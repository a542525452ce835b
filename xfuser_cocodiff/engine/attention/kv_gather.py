"""All-to-alls of Q, K and V along the fast axes, then an all-gather of K and V along the slow ones.

Neither Q nor O crosses the slow axes. A rank attends, with its heads of the fast axes, from the queries of its own slow
coordinate to all keys. The sequence is divided over the slow axes first, so keys arrive in their order.

Sizes in shapes: S coordinates on slow axes, F on fast axes; B batch, H heads, T tokens of a rank, D head dim; h heads
of a head group on a rank.
"""

from collections.abc import Sequence

import torch

from xfuser_cocodiff.engine.attention.reshard import HEADS, SEQUENCE, reshard_here
from xfuser_cocodiff.engine.comm.comm_stream import Handle
from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS, HeadGroup
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.compression import coded_all_gather
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs


def start(
    tensors: Sequence[torch.Tensor],
    partition: AxisPartition,
    label: Label,
    head_group: HeadGroup = ALL_HEADS,
    layer_codecs: LayerCodecs | None = None,
    is_blocking: bool = False,
    has_own_storage: bool = False,
) -> Handle[list[torch.Tensor]]:
    """Start to reshard tensors along the fast axes, and to gather K and V among them along the slow axes.

    Args:
        tensors: (B, H, T, D) each, of one dtype; they must not change before the handle has been waited for.
        partition: slow and fast axes; the slow ones must be the outermost.
        label: letters of the tensors, q first if it is there, and the layer's name.
        head_group: part of each rank's heads to send.
        layer_codecs: codecs for the slow axes; lossless when not given. Of one head group, V must be sent before or
            together with K.
        is_blocking: see :func:`start_seq_to_heads`.
        has_own_storage: likewise.

    Returns:
        A handle for Q (B, h, F * T, D), and K and V (B, h, S * F * T, D).
    """
    gathered = label.tensors.removeprefix("q")
    num_kept = len(tensors) - len(gathered)

    def communicate() -> list[torch.Tensor]:
        if partition.fast:
            local = reshard_here(tensors, HEADS, SEQUENCE, partition.fast, head_group, has_own_storage)
        else:
            local = [head_group.of(tensor, HEADS) for tensor in tensors]
        kept, blocks = local[:num_kept], local[num_kept:]
        if has_own_storage and not partition.fast:
            kept = [tensor.clone() for tensor in kept]
        return [*kept, *coded_all_gather.gather_sequence(gathered, blocks, partition, head_group, layer_codecs)]

    return partition.slow.start(label, communicate, lambda received: received, is_blocking)
