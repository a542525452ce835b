"""Ulysses attention over exchanges that hide behind computation.

V may be under way before Q and K exist (V-First). The heads of a rank may be cut into groups: while one attends, the
next ones come in and those before it go back. Then V of the first group alone goes first: attention begins when the
first group is there, and nothing that is needed later should be before it on the links.

Sizes in shapes: P ranks, B batch, S sequence, H heads, D head dim.
"""

from collections.abc import Callable
from typing import Any

import torch

from xfuser_cocodiff.engine.attention.reshard import HEADS, SEQUENCE, reshard, start_heads_to_seq, start_seq_to_heads
from xfuser_cocodiff.engine.comm.comm_stream import Handle
from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS, HeadGroup
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, HeadGroup], torch.Tensor]
"""Attention of one head group: Q, K, V (B, h, S, D) to O (B, h, S, D)."""


class Exchanges:
    """The exchanges of one call of attention. After an error peers still have to get what they were promised:
    :meth:`abandon` sees to that.

    Args:
        mesh: ranks and their topology.
        groups: number of head groups.
        layer: its name in traces.
        early: the exchange of V, or of its first head group, already under way.
        layer_codecs: what travels on slow axes; everything, as it is, when not given.
    """

    def __init__(
        self,
        mesh: Mesh,
        groups: int = 1,
        layer: str = "",
        early: Handle[list[torch.Tensor]] | None = None,
        layer_codecs: LayerCodecs | None = None,
    ) -> None:
        self.head_groups = [HeadGroup(index, groups) for index in range(groups)]
        self.layer_codecs = layer_codecs
        self._mesh, self._layer, self._early = mesh, layer, early
        self._coming: list[Handle[list[torch.Tensor]]] = []
        self._going: list[Handle[None]] = []
        self._result: torch.Tensor | None = None

    def send_value(self, value: torch.Tensor) -> None:
        """Start to send V, or its first head group, before Q and K."""
        label = Label("v", self._layer)
        self._early = start_seq_to_heads([value], self._mesh, label, self.head_groups[0], self.layer_codecs)

    def send(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_blocking: bool = False) -> None:
        """Start to send all head groups, so that the links never run dry.

        Args:
            query: shape (B, H, S/P, D).
            key: the same, perhaps with fewer heads.
            value: as `key`.
            is_blocking: whether the caller waits for them next, and computes nothing meanwhile.
        """
        for head_group in self.head_groups:
            is_ahead = self._early is not None and head_group.index == 0
            tensors, what = ([query, key], "qk") if is_ahead else ([query, key, value], "qkv")
            label, is_next = Label(what, self._layer), is_blocking and not is_ahead
            self._coming.append(start_seq_to_heads(tensors, self._mesh, label, head_group, self.layer_codecs, is_next))

    def receive(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Wait for Q, K and V of a head group, (B, h, S, D) each."""
        # Q and K follow the choice of tokens that came with V.
        first = self._early.wait() if self._early and index == 0 else []
        query, key, value = [*self._coming[index].wait(), *first]
        return query, key, value

    def send_back(self, output: torch.Tensor, index: int, is_blocking: bool = False) -> None:
        """Start to send O of a head group, (B, h, S, D), to the ranks that its tokens are of."""
        if self._result is None:
            self._result = output_like(output, len(self.head_groups), self._mesh.topology.size)
        head_group, label = self.head_groups[index], Label("o", self._layer)
        self._going.append(
            start_heads_to_seq(output, self._result, self._mesh, label, head_group, self.layer_codecs, is_blocking)
        )

    def end(self) -> torch.Tensor:
        """Wait for O, (B, H, S/P, D)."""
        for going in self._going:
            going.wait()
        return self._result

    def drain(self) -> None:
        """Wait for what is still under way."""
        under_way: list[Handle[Any]] = [*self._coming, *self._going, *([self._early] if self._early else [])]
        for handle in under_way:
            handle.drain()


def output_like(output: torch.Tensor, groups: int, num_ranks: int) -> torch.Tensor:
    """Return an empty tensor (B, H, S/P, D) for O of head groups (B, H/P/groups, S, D)."""
    batch, heads, tokens, head_dim = output.shape
    return output.new_empty(batch, heads * groups * num_ranks, tokens // num_ranks, head_dim)


def ulysses_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attend: Attend,
    mesh: Mesh,
    groups: int = 1,
    layer: str = "",
    early: Handle[list[torch.Tensor]] | None = None,
    layer_codecs: LayerCodecs | None = None,
    beside: Callable[[], object] | None = None,
) -> torch.Tensor:
    """Bring Q, K and V to the heads of this rank, attend, and bring O back.

    Args:
        query: shape (B, H, S/P, D).
        key: the same, perhaps with fewer heads; each count must be a multiple of P * `groups`.
        value: as `key`.
        attend: what attention is.
        mesh: as all that follows but `beside`, of :class:`Exchanges`; every element is that of one group, where
            attention treats heads alike.
        beside: computes something else, while Q, K and V travel.

    Returns:
        O, shape (B, H, S/P, D).
    """
    exchanges = Exchanges(mesh, groups, layer, early, layer_codecs)
    try:
        if groups == 1 and layer_codecs is None and beside is None:
            return _at_once(query, key, value, attend, mesh, layer, early)
        exchanges.send(query, key, value, is_blocking=groups == 1 and beside is None)
        if beside:
            beside()
        for head_group in exchanges.head_groups:
            attended = attend(*exchanges.receive(head_group.index), head_group)
            exchanges.send_back(attended, head_group.index, is_blocking=groups == 1)
        return exchanges.end()
    finally:
        exchanges.drain()


def _at_once(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attend: Attend,
    mesh: Mesh,
    layer: str,
    early: Handle[list[torch.Tensor]] | None,
) -> torch.Tensor:
    tensors, what = ([query, key], "qk") if early else ([query, key, value], "qkv")
    received = reshard(tensors, HEADS, SEQUENCE, mesh, Label(what, layer))
    query, key, value = [*received, *(early.wait() if early else [])]
    return reshard([attend(query, key, value, ALL_HEADS)], SEQUENCE, HEADS, mesh, Label("o", layer))[0]
