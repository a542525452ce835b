"""Virtual ranks: one rank applies the codecs of many, so that their quality can be judged without a cluster.

They form either a Ulysses group or a ring. Every row of a communicated tensor, one token of one head, has a source
rank and a destination rank. Rows that would cross a slow axis are a message of real ranks, encoded and decoded here.

Sizes in shapes: P virtual ranks, with S coordinates on slow axes and F on fast axes; B batch, H heads, N tokens, D head
dim.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch.nn import functional

from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.compression.axis_partition import AxisLayout
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs
from xfuser_cocodiff.engine.compression.message import Message
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.tools.comparison.segments import segments
from xfuser_cocodiff.tools.launching import single_rank

_HEAD_DIM, _TOKEN_DIM = 1, 2
"""Dims of heads and tokens in (B, H, N, D)."""
_NO_SLOTS = range(0)
"""Slots of this rank among those of its messages, which all are links between virtual ranks."""
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention from Q, K and V to O, (B, H, N, D) each."""


@dataclass(frozen=True)
class VirtualRanks:
    """Virtual ranks of a Ulysses group or of a ring."""

    topology: Topology
    """Topology of the virtual ranks."""
    slow_axes: tuple[str, ...]
    """Names of the slow axes."""
    may_gather: bool = False
    """Whether layers may gather K and V along the slow axes."""
    is_ring: ClassVar[bool] = False
    """Whether the ranks form a ring, in which only K and V are sent."""

    @functools.cached_property
    def layout(self) -> AxisLayout:
        """Slow and fast axes."""
        return AxisLayout.of(self.topology, self.slow_axes)

    @property
    def gather_layout(self) -> AxisLayout | None:
        """Layout whose slow side is the axes along which layers may gather K and V; None where they may not."""
        return self.layout if self.may_gather and not self.is_ring else None

    @property
    def _shape(self) -> tuple[int, int]:
        return self.layout.num_slow, self.layout.num_fast

    def is_divisible(self, size: int) -> bool:
        """Return whether a number of heads, or of tokens of a segment, is divisible by the number of ranks."""
        return size % self.topology.size == 0

    def shard_fraction(self, shape: Sequence[int], segments: Sequence[int], gathers_kv: bool = False) -> Fraction:
        """Return the fraction of tensors (B, H, N, D) that one of the ranks would have to send.

        Args:
            shape: shape of the tensors; that of K where K and V are gathered.
            segments: numbers of tokens of their segments, see :meth:`transmit`.
            gathers_kv: whether K and V are gathered, with heads zero-padded to a multiple of the fast coordinates.
        """
        heads = shape[_HEAD_DIM]
        is_sharded = self.is_ring or gathers_kv or self.is_divisible(heads)
        tokens = sum(size for size in segments if self.is_divisible(size)) if is_sharded else 0
        padded_heads = heads + -heads % self.layout.num_fast if gathers_kv else heads
        return Fraction(tokens * padded_heads, shape[_TOKEN_DIM] * self.topology.size * heads)

    def adopt(self, pipeline: Any) -> None:
        """Have the attention of a pipeline computed by xDiT's USP."""
        single_rank.install_processors(pipeline)

    def attention(self, call: Any) -> torch.Tensor:
        """Return attention on tensors with the compression error of all virtual ranks; see :class:`VirtualGroup`."""
        session, tensors = call.session, (call.query, call.key, call.value)
        layer, num_queries = session.layers.find_layer(), call.query.shape[2]
        layer_codecs = None
        if layer and not call.joint_strategy and not num_queries == call.key.shape[2] == call.value.shape[2]:
            session.runtime.inactive_reason = (
                "K and V have other tokens than Q, and their distribution over ranks is unknown"
            )
        elif layer and not call.joint_strategy:
            layer.count_call()
            parts = segments(layer.root.transformer, layer.root.shapes, num_queries)
            gathers_kv = call.gathers_coded
            fraction = self.shard_fraction((call.key if gathers_kv else call.query).shape, parts, gathers_kv)
            layer_codecs = session.codecs.of_layer(layer, LayerSizes.of(*tensors, fraction=fraction), gathers_kv)
        if layer_codecs is None:
            return call.compute_by_xdit()

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return replace(call, query=query, key=key, value=value).compute_by_xdit()

        return self.attend(tensors, parts, layer_codecs, attend)

    def attend(
        self, tensors: Sequence[torch.Tensor], segments: Sequence[int], layer_codecs: LayerCodecs, attention: Attention
    ) -> torch.Tensor:
        """Return attention as all virtual ranks would compute it together.

        Args:
            tensors: Q, K and V, (B, H, N, D) each.
            segments: numbers of tokens of their segments, see :meth:`transmit`.
            layer_codecs: codecs of the layer.
            attention: attention from Q, K and V to O.
        """
        if self.is_ring or layer_codecs.gathers_kv:
            return self._attend_gathered(tensors, segments, layer_codecs, attention)
        output = attention(*self.transmit("qkv", tensors, segments, layer_codecs))
        return self.transmit("o", [output], segments, layer_codecs)[0]

    def transmit(
        self, names: str, tensors: Sequence[torch.Tensor], segments: Sequence[int], layer_codecs: LayerCodecs
    ) -> list[torch.Tensor]:
        """Return tensors (B, H, N, D) as the ranks would receive them, all ranks together.

        Args:
            names: a letter for each tensor: q, k, v are sequence-sharded and become head-sharded, o the reverse.
            tensors: whole tensors.
            segments: numbers of tokens of segments such as text and image, each of which is sharded by itself. Segments
                that are not divisible are not compressed: xDiT replicates them.
            layer_codecs: codecs of the layer.
        """
        if not all(self.is_divisible(tensor.shape[_HEAD_DIM]) for tensor in tensors):
            return [*tensors]
        sources, targets = zip(*itertools.permutations(range(self.layout.num_slow), 2), strict=True)
        order = (2, 0, 1, 3) if names != "o" else (0, 2, 3, 1)  # source S, target S, target F, source F

        def send(shards: list[torch.Tensor]) -> None:
            """Send the rows of shards (S, F, B, H, n, D) that cross slow axes through the codecs, in place."""
            by_heads = (self._split(each, 2 + _HEAD_DIM) for each in shards)  # (S, F, S, F, B, h, n, D)
            rows = [each.permute(*order, 4, 5, 6, 7) for each in by_heads]
            values = [each[sources, targets].flatten(0, 1).flatten(1, 2) for each in rows]
            received = _through_codecs(names, values, layer_codecs)
            for each, new in zip(rows, received, strict=True):
                each[sources, targets] = new.view(len(sources), *each.shape[2:])

        return self._send_shards(tensors, segments, send)

    def _send_shards(
        self,
        tensors: Sequence[torch.Tensor],
        segments: Sequence[int],
        send: Callable[[list[torch.Tensor]], None],
    ) -> list[torch.Tensor]:
        """Return tensors (B, H, N, D) after `send` has changed the shards (S, F, B, H, n, D) of each."""
        parts = [[*tensor.split([*segments], _TOKEN_DIM)] for tensor in tensors]
        sharded = [index for index, size in enumerate(segments) if self.is_divisible(size)]
        if not sharded:
            return [*tensors]
        sizes = [segments[index] // self.topology.size for index in sharded]
        dim = 2 + _TOKEN_DIM
        shards = [torch.cat([self._split(each[index], _TOKEN_DIM) for index in sharded], dim) for each in parts]
        send(shards)
        for each, shard in zip(parts, shards, strict=True):
            for index, part in zip(sharded, shard.split(sizes, dim), strict=True):
                each[index] = self._join(part, _TOKEN_DIM)
        return [torch.cat(each, _TOKEN_DIM) for each in parts]

    def _split(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return a view of (..., P * n, ...) as (S, F, ..., n, ...)."""
        return tensor.unflatten(dim, (*self._shape, -1)).movedim((dim, dim + 1), (0, 1))

    def _join(self, split: torch.Tensor, dim: int) -> torch.Tensor:
        """Return (S, F, ..., n, ...) as (..., P * n, ...); the inverse of :meth:`_split`."""
        return split.movedim((0, 1), (dim, dim + 1)).flatten(dim, dim + 2)

    def _attend_gathered(
        self, tensors: Sequence[torch.Tensor], segments: Sequence[int], layer_codecs: LayerCodecs, attention: Attention
    ) -> torch.Tensor:
        """Return attention as all virtual ranks would compute it together where K and V are gathered; see
        :meth:`attend`.

        Queries of a slow coordinate attend to K and V of all ranks: unchanged from that coordinate, and coded from all
        others. For replicated tokens, O is that of the ranks at the first slow coordinate.
        """
        query, *exact = tensors

        def send(shards: list[torch.Tensor]) -> None:
            values = [self._along_fast(each) for each in shards]
            received = _through_codecs("kv", values, layer_codecs, copies=self.layout.num_slow - 1)
            for each, new in zip(shards, received, strict=True):
                each.copy_(self._back(new, each.shape[2 + _HEAD_DIM]))

        coded = self._send_shards(exact, segments, send)
        slow_indices = self._slow_indices_of(segments, query.device)[:, None]
        result = None
        for slow_index in range(self.layout.num_slow):
            is_own = slow_indices == slow_index
            key, value = (torch.where(is_own, *pair) for pair in zip(exact, coded, strict=True))
            output = attention(query, key, value)
            result = output if result is None else torch.where(is_own, output, result)
        return result

    def _slow_indices_of(self, segments: Sequence[int], device: torch.device) -> torch.Tensor:
        """Return the slow coordinate of each token's rank, int64 (N); 0 for replicated tokens."""
        of_rank = torch.arange(self.topology.size, device=device) // self.layout.num_fast
        of_segments = [
            of_rank.repeat_interleave(size // len(of_rank)) if self.is_divisible(size) else of_rank.new_zeros(size)
            for size in segments
        ]
        return torch.cat(of_segments)

    def _along_fast(self, shards: torch.Tensor) -> torch.Tensor:
        """Return each rank's tokens (S, F, B, H, T, D) as sent: by heads along the fast axes, zero-padded where
        these do not divide the heads, (P, B, h, F * T, D)."""
        num_fast = self.layout.num_fast
        padded = functional.pad(shards, (0, 0, 0, 0, 0, -shards.shape[2 + _HEAD_DIM] % num_fast))
        by_heads = padded.unflatten(3, (num_fast, -1)).permute(0, 3, 2, 4, 1, 5, 6)
        return by_heads.flatten(4, 5).flatten(0, 1)

    def _back(self, sent: torch.Tensor, heads: int) -> torch.Tensor:
        """Return what was sent (P, B, h, F * T, D) as each rank's tokens (S, F, B, H, T, D)."""
        by_heads = sent.unflatten(0, self._shape).unflatten(4, (self.layout.num_fast, -1))
        return by_heads.permute(0, 4, 2, 1, 3, 5, 6).flatten(3, 4)[:, :, :, :heads]


class VirtualRing(VirtualRanks):
    """Virtual ranks of a ring, each of which sends its own tokens."""

    is_ring = True

    def _along_fast(self, shards: torch.Tensor) -> torch.Tensor:
        return shards.flatten(0, 1)

    def _back(self, sent: torch.Tensor, heads: int) -> torch.Tensor:
        return sent.unflatten(0, self._shape)


@torch.no_grad()
def _through_codecs(
    names: str, values: Sequence[torch.Tensor], layer_codecs: LayerCodecs, copies: int | None = None
) -> list[torch.Tensor]:
    """Return values (L, G, H, T, D) of one message as receivers decode them.

    Args:
        names: a letter for each tensor.
        values: values by link.
        layer_codecs: codecs of the layer.
        copies: number of receivers that all get the same values; None if each link has its own.
    """
    message = Message(Label(names), values, layer_codecs, _NO_SLOTS, copies)
    received = [torch.empty_like(each) for each in values]
    message.decode(message.encode(), received, lambda sent: sent)
    return received
