"""Ulysses attention whose all-to-alls overlap with computation.

V may be in flight before Q and K exist (V-First). The heads of a rank may be split into groups: while one group
attends, the inputs of the next groups and the outputs of earlier ones are in flight. With several groups, only V of
the first group is sent early: attention starts as soon as the first group has arrived, so nothing that is needed later
may precede it on the links.

Sizes in shapes: P ranks, B batch, S sequence, H heads, h heads of a head group, D head dim.
"""

from collections.abc import Callable
from typing import Any

import torch

from xfuser_cocodiff.engine.attention import kv_gather
from xfuser_cocodiff.engine.attention.reshard import HEADS, SEQUENCE, reshard, start_heads_to_seq, start_seq_to_heads
from xfuser_cocodiff.engine.comm.comm_stream import Handle
from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS, HeadGroup
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, HeadGroup], torch.Tensor]
"""Attention of one head group: Q, K, V (B, h, S, D) to O (B, h, S, D); Q and O have fewer tokens where K and V are
gathered."""


class AttentionAllToAlls:
    """The communication of one attention call: all-to-alls, and with `gather` an all-gather of K and V.

    After an error, call :meth:`drain`: peers still wait for the messages of this rank.

    Args:
        mesh: ranks and their topology.
        groups: number of head groups.
        layer: name of the layer in traces.
        early_value: handle of V, or of its first head group, if it is in flight already.
        layer_codecs: codecs for slow axes; lossless when not given.
        has_own_storage: whether Q, K and V need a storage each.
        gather: partition whose slow side is the axes along which K and V are gathered; all-to-alls are limited to its
            fast side. None where all tensors are resharded along all axes.
    """

    def __init__(
        self,
        mesh: Mesh,
        groups: int = 1,
        layer: str = "",
        early_value: Handle[list[torch.Tensor]] | None = None,
        layer_codecs: LayerCodecs | None = None,
        has_own_storage: bool = False,
        gather: AxisPartition | None = None,
    ) -> None:
        self.head_groups = [HeadGroup(index, groups) for index in range(groups)]
        self.layer_codecs = layer_codecs
        self._mesh, self._layer, self._early_value = mesh, layer, early_value
        self._has_own_storage, self._gather = has_own_storage, gather
        self._inputs: list[Handle[list[torch.Tensor]]] = []
        self._outputs: list[Handle[None]] = []
        self._result: torch.Tensor | None = None

    @property
    def gathers_kv(self) -> bool:
        """Whether K and V are gathered along some axes."""
        return self._gather is not None

    def start_value(self, value: torch.Tensor) -> Handle[list[torch.Tensor]]:
        """Start the all-to-all of V, or of its first head group, before Q and K are computed, and return its handle."""
        self._early_value = self._start("v", [value], self.head_groups[0])
        return self._early_value

    def start_inputs(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_blocking: bool = False
    ) -> None:
        """Start the all-to-alls of Q, K and V of all head groups at once, so that the links are never idle.

        Args:
            query: shape (B, H, S/P, D).
            key: the same shape, perhaps with fewer heads.
            value: shaped as `key`.
            is_blocking: whether the caller waits for them right away and computes nothing meanwhile.
        """
        for head_group in self.head_groups:
            has_value = self._early_value is not None and head_group.index == 0
            tensors, names = ([query, key], "qk") if has_value else ([query, key, value], "qkv")
            self._inputs.append(self._start(names, tensors, head_group, is_blocking and not has_value))

    def _start(
        self, names: str, tensors: list[torch.Tensor], head_group: HeadGroup, is_blocking: bool = False
    ) -> Handle[list[torch.Tensor]]:
        label, options = Label(names, self._layer), (head_group, self.layer_codecs, is_blocking, self._has_own_storage)
        if self._gather:
            return kv_gather.start(tensors, self._gather, label, *options)
        return start_seq_to_heads(tensors, self._mesh, label, *options)

    def wait_inputs(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Wait for Q, K and V of a head group and return them, (B, h, S, D) each.

        Where K and V are gathered, Q has the tokens of this rank's slow coordinate only.
        """
        # V is decoded first: the tokens that its codec selected apply to Q and K too.
        early = self._early_value.wait() if self._early_value and index == 0 else []
        query, key, value = [*self._inputs[index].wait(), *early]
        return query, key, value

    def start_output(self, output: torch.Tensor, index: int, is_blocking: bool = False) -> None:
        """Start the all-to-all that returns O of a head group, (B, h, S, D), to the ranks of its tokens."""
        mesh, codecs = (self._gather.fast, None) if self._gather else (self._mesh, self.layer_codecs)
        if self._result is None:
            self._result = output_like(output, len(self.head_groups), mesh.topology.size if mesh else 1)
        head_group, label = self.head_groups[index], Label("o", self._layer)
        if mesh is None:  # all axes are slow, and O stays on its rank
            head_group.of(self._result, HEADS).copy_(output)
            return
        self._outputs.append(
            start_heads_to_seq(output, self._result, mesh, label, head_group, codecs, is_blocking, self.gathers_kv)
        )

    def wait_output(self) -> torch.Tensor:
        """Wait for O of all head groups and return it, (B, H, S/P, D)."""
        for handle in self._outputs:
            handle.wait()
        return self._result

    def drain(self) -> None:
        """Wait for everything that is still in flight and drop the results."""
        early = [self._early_value] if self._early_value else []
        in_flight: list[Handle[Any]] = [*self._inputs, *self._outputs, *early]
        for handle in in_flight:
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
    early_value: Handle[list[torch.Tensor]] | None = None,
    layer_codecs: LayerCodecs | None = None,
    overlapped: Callable[[], object] | None = None,
    gather: AxisPartition | None = None,
) -> torch.Tensor:
    """Return the attention output of a rank's tokens, computed by heads on all ranks of a mesh.

    Args:
        query: shape (B, H, S/P, D).
        key: the same shape, perhaps with fewer heads; each head count must be a multiple of P * `groups`.
        value: shaped as `key`.
        attend: attention function for one head group.
        mesh: ranks and their topology.
        groups: number of head groups; a value above 1 requires that `attend` treats heads independently.
        layer: name of the layer in traces.
        early_value: handle of V, or of its first head group, if it is in flight already.
        layer_codecs: codecs for slow axes; lossless when not given.
        overlapped: computation to run while Q, K and V are in flight.
        gather: partition whose slow side is the axes along which K and V are gathered; heads are then divided over
            its fast side. None to reshard along all axes.

    Returns:
        O, shape (B, H, S/P, D).
    """
    all_to_alls = AttentionAllToAlls(mesh, groups, layer, early_value, layer_codecs, gather=gather)
    try:
        if groups == 1 and layer_codecs is None and overlapped is None and gather is None:
            return _attend_without_overlap(query, key, value, attend, mesh, layer, early_value)
        all_to_alls.start_inputs(query, key, value, is_blocking=groups == 1 and overlapped is None)
        if overlapped:
            overlapped()
        for head_group in all_to_alls.head_groups:
            attended = attend(*all_to_alls.wait_inputs(head_group.index), head_group)
            all_to_alls.start_output(attended, head_group.index, is_blocking=groups == 1)
        return all_to_alls.wait_output()
    finally:
        all_to_alls.drain()


def _attend_without_overlap(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attend: Attend,
    mesh: Mesh,
    layer: str,
    early_value: Handle[list[torch.Tensor]] | None,
) -> torch.Tensor:
    """Run blocking, lossless all-to-alls around attention: the shortest path on the host."""
    tensors, names = ([query, key], "qk") if early_value else ([query, key, value], "qkv")
    received = reshard(tensors, HEADS, SEQUENCE, mesh, Label(names, layer))
    query, key, value = [*received, *(early_value.wait() if early_value else [])]
    return reshard([attend(query, key, value, ALL_HEADS)], SEQUENCE, HEADS, mesh, Label("o", layer))[0]
