"""Ring attention: a rank attends to its own K and V while those of the others come along the topology.

Blocks are attended to as they come, and merged in the order in which PyTorch's ring, which xDiT runs, meets them: by
their log-sum-exp, with the same arithmetic, so that the bits are the same.

Sizes in shapes: P ranks of the ring; B batch, H heads, S queries, T keys of a block, D head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS, HeadGroup
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.compression import coded_all_gather
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.coded_all_gather import Block, Blocks
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs

Attended = tuple[torch.Tensor, torch.Tensor]
AttendBlock = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], Attended]
"""From Q (B, H, S, D), K and V (B, H, T, D) of a block, and its place in the order, to O (B, H, S, D) and its
log-sum-exp (B, H, S), perhaps with a last dim of 1."""


@dataclass(frozen=True)
class Ring:
    """The ranks of a ring, as this rank sees them."""

    mesh: Mesh
    here: int
    """This rank's place."""
    way: AxisPartition | None = None
    """Its slow axes, where something is to be approximated."""

    @property
    def order(self) -> list[int]:
        """Ranks in the order in which their blocks are merged: this one, then those behind it."""
        size = self.mesh.topology.size
        return [(self.here - away) % size for away in range(size)]


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attend: AttendBlock,
    ring: Ring,
    layer: str = "",
    head_group: HeadGroup = ALL_HEADS,
    layer_codecs: LayerCodecs | None = None,
) -> torch.Tensor:
    """Attend to the K and V of all ranks of a ring.

    Args:
        query: shape (B, H, S, D).
        key: of this rank, shape (B, h, T, D), as large on every rank.
        value: as `key`.
        attend: what attention is.
        ring: the ranks.
        layer: its name in traces.
        head_group: of the heads that these are.
        layer_codecs: what travels on slow axes; everything, as it is, when not given.

    Returns:
        O, shape (B, H, S, D).
    """
    handles = coded_all_gather.start([key, value], ring.mesh, Label("kv", layer), head_group, layer_codecs)
    merged = _Merged(ring.order, lambda block, place: attend(query, block[0], block[1], place))
    try:
        merged.take({ring.here: (key, value)})
        for handle in handles:
            merged.take(handle.wait())
    finally:  # after an error, peers still have to get what they were promised
        for handle in handles:
            handle.drain()
    return merged.output


class _Merged:
    """What came of blocks, merged as far as those before them in the order have come."""

    def __init__(self, order: list[int], attend: Callable[[Block, int], Attended]) -> None:
        self._order, self._attend, self._done = order, attend, 0
        self._waiting: dict[int, Attended] = {}
        self._merged: Attended

    def take(self, blocks: Blocks) -> None:
        """Attend to blocks that have come; those of ranks whose block has come before do not count."""
        for place in sorted(map(self._order.index, blocks)):
            if place >= self._done:
                self._waiting[place] = self._attend(blocks[self._order[place]], place)
            while self._done in self._waiting:  # at once, so that few of them wait
                self._merge(*self._waiting.pop(self._done))
                self._done += 1

    def _merge(self, output: torch.Tensor, lse: torch.Tensor) -> None:
        self._dtype = output.dtype
        output, lse = output.float(), lse.float()
        lse = lse if lse.ndim == output.ndim else lse.unsqueeze(-1)
        if self._done == 0:
            self._merged = output, lse
            return
        before, before_lse = self._merged
        self._merged = (
            before - functional.sigmoid(lse - before_lse) * (before - output),
            before_lse - functional.logsigmoid(before_lse - lse),
        )

    @property
    def output(self) -> torch.Tensor:
        """Of all of them."""
        return self._merged[0].to(self._dtype)
