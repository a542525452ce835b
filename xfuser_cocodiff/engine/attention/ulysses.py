"""Ulysses attention whose communication overlaps with computation.

V may be in flight before Q and K exist (V-First). The heads of a rank may be split into groups: while one group
attends, the inputs of the next groups and the outputs of earlier ones are in flight. With several groups, only V of
the first group is sent early: attention starts as soon as the first group has arrived, so nothing that is needed later
may precede it on the links.

Where K and V are gathered along slow axes, Q and O do not cross these: all-to-alls are limited to the fast axes. A rank
attends, with its heads of the fast axes, from the queries of its own slow coordinate to all keys. The sequence is
divided over the slow axes first, so gathered keys are in the order of the sequence.

Sizes in shapes: P ranks, B batch, S sequence, H heads, h heads of a head group, D head dim.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from xfuser_cocodiff.engine.attention.reshard import (
    HEADS,
    SEQUENCE,
    reshard_here,
    start_heads_to_seq,
    start_seq_to_heads,
)
from xfuser_cocodiff.engine.comm.comm_stream import Handle
from xfuser_cocodiff.engine.comm.head_group import HeadGroup
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.coded_all_gather import gather
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, HeadGroup], torch.Tensor]
"""Attention of one head group: Q, K, V (B, h, S, D) to O (B, h, S, D); Q and O have fewer tokens where K and V are
gathered."""


class UlyssesAttention:
    """One call of Ulysses attention. :meth:`run` does all of it; V may have been started before.

    Args:
        mesh: ranks and their topology.
        groups: number of head groups; a value above 1 requires that attention treats heads independently.
        layer: name of the layer in traces.
        early_value: handle of V, or of its first head group, if it is in flight already.
        layer_codecs: codecs for slow axes; lossless when not given.
        gather: slow axes, along which K and V are gathered, and fast ones; None to reshard all tensors along all axes.
    """

    def __init__(
        self,
        mesh: Mesh,
        groups: int = 1,
        layer: str = "",
        early_value: Handle[list[torch.Tensor]] | None = None,
        layer_codecs: LayerCodecs | None = None,
        gather: AxisPartition | None = None,
    ) -> None:
        self.layer_codecs, self.gather = layer_codecs, gather
        self._mesh, self._layer, self._groups, self._early_value = mesh, layer, groups, early_value
        self._inputs: list[Handle[list[torch.Tensor]]] = []
        self._outputs: list[Handle[Any]] = []
        self._result: torch.Tensor | None = None

    def run(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attend: Attend,
        overlapped: Callable[[], object] | None = None,
    ) -> torch.Tensor:
        """Return the attention output O of a rank's tokens, (B, H, S/P, D).

        Args:
            query: shape (B, H, S/P, D).
            key: the same shape, perhaps with fewer heads; the ranks that share the heads, times the number of head
                groups, must divide each head count.
            value: shaped as `key`.
            attend: attention function for one head group.
            overlapped: computation to run while Q, K and V are in flight.
        """
        is_blocking = self._groups == 1 and overlapped is None
        try:
            self.start_inputs(query, key, value, is_blocking)
            if overlapped:
                overlapped()
            for index in range(self._groups):
                attended = attend(*self.wait_inputs(index), HeadGroup(index, self._groups))
                self._start_output(attended, index, is_blocking=self._groups == 1)
            for handle in self._outputs:
                handle.wait()
            return self._result
        finally:
            self.drain()

    def start_value(self, value: torch.Tensor) -> Handle[list[torch.Tensor]]:
        """Start to send V, or its first head group, before Q and K are computed, and return its handle."""
        self._early_value = self._start("v", [value], 0)
        return self._early_value

    def start_inputs(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_blocking: bool = False
    ) -> None:
        """Start to send Q, K and V of all head groups at once, so that the links are never idle; see :meth:`run`.

        Args:
            query: shape (B, H, S/P, D).
            key: the same shape, perhaps with fewer heads.
            value: shaped as `key`.
            is_blocking: whether the caller waits for them right away and computes nothing meanwhile.
        """
        for index in range(self._groups):
            has_value = self._early_value is not None and index == 0
            tensors, names = ([query, key], "qk") if has_value else ([query, key, value], "qkv")
            self._inputs.append(self._start(names, tensors, index, is_blocking and not has_value))

    def _start(
        self, names: str, tensors: list[torch.Tensor], index: int, is_blocking: bool = False
    ) -> Handle[list[torch.Tensor]]:
        label = Label(names, self._layer, HeadGroup(index, self._groups))
        if self.gather:
            # Bound now: the comm stream may run it after V's codecs have been followed by those of Q and K.
            work = functools.partial(self._gathered, tensors, self.gather, label, self.layer_codecs)
            return self._mesh.start(label, work, list, is_blocking)
        return start_seq_to_heads(tensors, self._mesh, label, self.layer_codecs, is_blocking)

    def _gathered(
        self, tensors: list[torch.Tensor], partition: AxisPartition, label: Label, layer_codecs: LayerCodecs | None
    ) -> list[torch.Tensor]:
        """Reshard tensors along the fast axes, then gather K and V among them along the slow ones."""
        if partition.fast:
            local = reshard_here(tensors, HEADS, SEQUENCE, partition.fast, label.head_group)
        else:
            local = [label.head_group.of(tensor, HEADS) for tensor in tensors]
        names = label.tensors.removeprefix("q")
        queries, blocks = local[: -len(names)], local[-len(names) :]
        return [*queries, *gather(blocks, partition.slow, label._replace(tensors=names), layer_codecs)]

    def wait_inputs(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Wait for Q, K and V of a head group and return them, (B, h, S, D) each.

        Where K and V are gathered, Q has the tokens of this rank's slow coordinate only.
        """
        # V is decoded first: the tokens that its codec selected apply to Q and K too.
        early = self._early_value.wait() if self._early_value and index == 0 else []
        query, key, value = [*self._inputs[index].wait(), *early]
        return query, key, value

    def _start_output(self, output: torch.Tensor, index: int, is_blocking: bool) -> None:
        """Start the all-to-all that returns O of a head group, (B, h, S, D), to the ranks of its tokens."""
        mesh, codecs = (self.gather.fast, None) if self.gather else (self._mesh, self.layer_codecs)
        if self._result is None:
            (batch, heads, tokens, head_dim), ranks = output.shape, mesh.topology.size if mesh else 1
            self._result = output.new_empty(batch, heads * self._groups * ranks, tokens // ranks, head_dim)
        label = Label("o", self._layer, HeadGroup(index, self._groups))
        if mesh is None:  # all axes are slow, and O stays on its rank
            label.head_group.of(self._result, HEADS).copy_(output)
            return
        self._outputs.append(start_heads_to_seq(output, self._result, mesh, label, codecs, is_blocking))

    def drain(self) -> None:
        """Wait for everything that is still in flight and drop the results."""
        # V first, as for decoding: the tokens that its codec selected apply to Q and K too.
        early = [self._early_value] if self._early_value else []
        in_flight: list[Handle[Any]] = [*early, *self._inputs, *self._outputs]
        for handle in in_flight:
            handle.drain()
