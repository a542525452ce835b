"""Virtual ranks: one rank applies the codecs of many, so that their quality can be judged without a cluster.

They simulate either a Ulysses group or a ring. Every row of a communicated tensor, one token of one head, has a source
rank and a destination rank. Rows that would cross a slow axis go through the codec, against one link reference in place
of the two at the ends of a link.

Sizes in shapes: P virtual ranks, with S coordinates on slow axes and F on fast axes; B batch, H heads, N tokens, D head
dim.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch.nn import functional

from xfuser_cocodiff.engine.codec import coded_tensor, yardsticks
from xfuser_cocodiff.engine.codec.codec import EXACT, aligned, section_bytes
from xfuser_cocodiff.engine.codec.coded_tensor import CodedTensor, QuantError
from xfuser_cocodiff.engine.codec.lead import decoded_values
from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS
from xfuser_cocodiff.engine.compression.axis_partition import AxisLayout
from xfuser_cocodiff.engine.compression.layer_codecs import (
    LayerCodecs,
    active_tokens_for,
    codec_for,
    is_finite,
    joint_for,
)
from xfuser_cocodiff.engine.topology.topology import Topology

_HEAD_DIM, _TOKEN_DIM = 1, 2
"""Dims of heads and tokens in (B, H, N, D)."""
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention from Q, K and V to O, (B, H, N, D) each."""


@dataclass(frozen=True)
class VirtualRanks:
    """Simulated ranks of a Ulysses group or of a ring."""

    topology: Topology
    """Topology of the virtual ranks."""
    slow_axes: tuple[str, ...]
    """Names of the slow axes."""
    may_gather: bool = False
    """Whether layers may gather K and V along the slow axes."""
    is_ring: ClassVar[bool] = False
    """Whether the ranks form a ring, in which only K and V are sent."""

    @functools.cached_property
    def _layout(self) -> AxisLayout:
        slow = [index for index, axis in enumerate(self.topology.axes) if axis.name in self.slow_axes]
        return AxisLayout(tuple(slow), self.topology.shape)

    @property
    def num_slow(self) -> int:
        """Number of coordinates on the slow axes."""
        return self._layout.num_slow

    @property
    def num_fast(self) -> int:
        """Number of coordinates on the fast axes."""
        return self._layout.num_fast

    @property
    def gather_layout(self) -> AxisLayout | None:
        """Layout whose slow side is the axes along which layers may gather K and V; None where they may not."""
        return self._layout if self.may_gather and not self.is_ring else None

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
        padded_heads = heads + -heads % self.num_fast if gathers_kv else heads
        return Fraction(tokens * padded_heads, shape[_TOKEN_DIM] * self.topology.size * heads)

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
    ) -> list:
        """Return tensors (B, H, N, D) as the ranks would receive them, all ranks together.

        Args:
            names: a letter for each tensor: q, k, v are sequence-sharded and become head-sharded, o the reverse.
            tensors: whole tensors.
            segments: numbers of tokens of segments such as text and image, each of which is sharded by itself. Segments
                that are not divisible are not compressed: xDiT replicates them.
            layer_codecs: codecs of the layer.
        """
        received = {}
        for name, tensor in sorted(zip(names, tensors, strict=True), key=lambda pair: pair[0] != "v"):
            parts = list(tensor.split(list(segments), _TOKEN_DIM))
            sharded = [index for index, size in enumerate(segments) if self.is_divisible(size)]
            if sharded and self.is_divisible(tensor.shape[_HEAD_DIM]):
                sent = self._transmit_segments(name, [parts[index] for index in sharded], layer_codecs)
                for index, part in zip(sharded, sent, strict=True):
                    parts[index] = part
            received[name] = torch.cat(parts, _TOKEN_DIM)
        return [received[name] for name in names]

    def _transmit_segments(self, name: str, parts: list[torch.Tensor], layer_codecs: LayerCodecs) -> list[torch.Tensor]:
        """Return segments (B, H, N, D) whose rows that cross slow axes have gone through the codec."""
        order = (2, 0, 1, 3) if name != "o" else (0, 2, 3, 1)  # source S, target S, target F, source F
        shards = torch.cat([self._split(part, _TOKEN_DIM) for part in parts], 2 + _TOKEN_DIM)
        split = self._split(shards, 2 + _HEAD_DIM)  # (S, F, S, F, B, n, s, D): heads, then tokens
        rows = split.permute(*order, 4, 5, 6, 7)
        sources, targets = zip(*itertools.permutations(range(self.num_slow), 2), strict=True)
        values = rows[sources, targets].flatten(0, 1).flatten(1, 2)
        sent = rows.clone()
        received = _through_codecs(name, values, layer_codecs, samples=rows.shape[4])
        sent[sources, targets] = received.view(len(sources), *rows.shape[2:])
        split = sent.permute(*map(order.index, range(4)), 4, 5, 6, 7)
        shards = self._join(split, 2 + _HEAD_DIM)
        sizes = [part.shape[_TOKEN_DIM] // self.topology.size for part in parts]
        return [self._join(shard, _TOKEN_DIM) for shard in shards.split(sizes, 2 + _TOKEN_DIM)]

    def _split(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return a view of (..., P * n, ...) as (S, F, ..., n, ...)."""
        by_axis, num_axes = tensor.unflatten(dim, (*self.topology.shape, -1)), len(self.topology.shape)
        return self._layout.split(by_axis.movedim([*range(dim, dim + num_axes)], [*range(num_axes)]))

    def _join(self, split: torch.Tensor, dim: int) -> torch.Tensor:
        """Return (S, F, ..., n, ...) as (..., P * n, ...); the inverse of :meth:`_split`."""
        by_axis, num_axes = self._layout.join(split), len(self.topology.shape)
        return by_axis.movedim([*range(num_axes)], [*range(dim, dim + num_axes)]).flatten(dim, dim + num_axes)

    def _attend_gathered(
        self, tensors: Sequence[torch.Tensor], segments: Sequence[int], layer_codecs: LayerCodecs, attention: Attention
    ) -> torch.Tensor:
        """Return attention as all virtual ranks would compute it together where K and V are gathered; see
        :meth:`attend`.

        Queries of a slow coordinate attend to K and V of all ranks: unchanged from that coordinate, and coded from all
        others. For replicated tokens, O is that of the ranks at the first slow coordinate.
        """
        query, *exact = tensors
        coded = [
            self._transmit_blocks(name, tensor, segments, layer_codecs)
            for name, tensor in zip("vk", exact[::-1], strict=True)
        ]
        slow_indices = self._slow_indices_of(segments, query.device)[:, None]
        result = None
        for slow_index in range(self.num_slow):
            is_own = slow_indices == slow_index
            key, value = (torch.where(is_own, *pair) for pair in zip(exact, coded[::-1], strict=True))
            output = attention(query, key, value)
            result = output if result is None else torch.where(is_own, output, result)
        return result

    def _slow_indices_of(self, segments: Sequence[int], device: torch.device) -> torch.Tensor:
        """Return the slow coordinate of each token's rank, int64 (N); 0 for replicated tokens."""
        of_rank = torch.empty(self.topology.size, dtype=torch.long)
        of_rank[torch.tensor(self._layout.ranks_by_slow_index)] = torch.arange(self.num_slow)[:, None]
        of_segments = [
            of_rank.repeat_interleave(size // self.topology.size)
            if self.is_divisible(size)
            else torch.zeros(size, dtype=torch.long)
            for size in segments
        ]
        return torch.cat(of_segments).to(device)

    def _transmit_blocks(
        self, name: str, tensor: torch.Tensor, segments: Sequence[int], layer_codecs: LayerCodecs
    ) -> torch.Tensor:
        """Return a tensor (B, H, N, D) as other ranks receive it: a block of each rank, the same for all receivers."""
        size, parts = self.topology.size, list(tensor.split(list(segments), _TOKEN_DIM))
        sharded = [index for index, tokens in enumerate(segments) if self.is_divisible(tokens)]
        if not sharded:
            return tensor
        blocks = [parts[index].unflatten(_TOKEN_DIM, (size, -1)).permute(2, 0, 1, 3, 4) for index in sharded]
        sent = self._reshard_along_fast(torch.cat(blocks, 3))
        received = _through_codecs(name, sent, layer_codecs, tensor.shape[0], self.num_slow - 1)
        received = self._reshard_back(received, tensor.shape[_HEAD_DIM])
        for index, part in zip(sharded, received.split([block.shape[3] for block in blocks], 3), strict=True):
            parts[index] = part.permute(1, 2, 0, 3, 4).flatten(_TOKEN_DIM, _TOKEN_DIM + 1)
        return torch.cat(parts, _TOKEN_DIM)

    def _reshard_along_fast(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return each rank's tokens (P, B, H, T, D) as it sends them: by heads along the fast axes, zero-padded where
        these do not divide the heads, (P, B, h, F * T, D)."""
        padded = functional.pad(blocks, (0, 0, 0, 0, 0, -blocks.shape[2] % self.num_fast))
        by_slow = self._layout.split(padded.unflatten(0, self.topology.shape))  # (S, F, B, H, T, D)
        by_heads = by_slow.unflatten(3, (self.num_fast, -1)).permute(0, 3, 2, 4, 1, 5, 6)
        return by_heads.flatten(4, 5).flatten(0, 1)

    def _reshard_back(self, sent: torch.Tensor, heads: int) -> torch.Tensor:
        """Return what was sent (P, B, h, F * T, D) as each rank's tokens (P, B, H, T, D)."""
        by_heads = sent.unflatten(0, (self.num_slow, -1)).unflatten(4, (self.num_fast, -1))
        by_slow = by_heads.permute(0, 4, 2, 1, 3, 5, 6).flatten(3, 4)[:, :, :, :heads]
        return self._layout.join(by_slow).flatten(0, len(self.topology.shape) - 1)


class VirtualRing(VirtualRanks):
    """Simulated ranks of a ring."""

    is_ring = True

    def _reshard_along_fast(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks

    def _reshard_back(self, sent: torch.Tensor, heads: int) -> torch.Tensor:
        return sent


def _through_codecs(
    name: str, values: torch.Tensor, layer_codecs: LayerCodecs, samples: int, copies: int = 1
) -> torch.Tensor:
    """Return values (L, G, H, T, D) as receivers decode them, and add to the statistics.

    Args:
        name: the tensor's letter.
        values: values by link.
        layer_codecs: codecs of the layer.
        samples: number of samples in the batch.
        copies: number of receivers of each link's values.
    """
    parts = layer_codecs.split_branches(name, values, samples)
    received = [_through_codec(each, part, layer_codecs, copies) for each, part in parts.items()]
    layer_codecs.release_sent(name, ALL_HEADS)
    layer_codecs.drop_references(parts, ALL_HEADS)
    return layer_codecs.join_branches(received, samples)


def _through_codec(name: str, values: torch.Tensor, layer_codecs: LayerCodecs, copies: int) -> torch.Tensor:
    """Return the values of one branch in a batch; see :func:`_through_codecs`."""
    of_tensor, stats = (layer_codecs, name, ALL_HEADS), layer_codecs.stats
    codec = codec_for(*of_tensor, values.shape, values.dtype)
    joint = joint_for(*of_tensor, values.shape, values.dtype, codec)
    link_state = layer_codecs.link_state(name, ALL_HEADS)
    reference, lead = link_state.sent, joint.at_sender() if joint else None
    if lead:
        lead.prepare(reference, codec)
    active = active_tokens_for(*of_tensor, values, codec, lead=lead)
    layer_codecs.note_sent(name, ALL_HEADS, values, None)
    if layer_codecs.measures_yardsticks and not codec.is_exact:
        stats.quant_errors += yardsticks.measure(values).items()
    sizes = section_bytes(codec, name, values.shape, values.dtype)
    payload = values.new_empty(len(values), sizes[1], dtype=torch.uint8)
    stats.sent_bytes += copies * len(values) * sum(map(aligned, sizes))
    stats.exact_bytes += copies * values.nbytes
    tensor = CodedTensor(values, reference, codec, active, payload, None, lead, link_state.sent_values)
    error: QuantError | None
    if tensor.is_quantized:
        error, received = coded_tensor.round_trip(tensor)
    else:
        [error] = coded_tensor.encode([tensor])
        received = values if codec.is_exact else decoded_values(reference, lead)
    if error:
        stats.quant_errors.append((name[0], error))
    if error and not is_finite(error):
        stats.repeated += 1
        link_state.drop_kept()
        payload, lead = torch.empty_like(values).flatten(1).view(torch.uint8), lead and lead.alone()
        coded_tensor.encode([CodedTensor(values, reference, EXACT, None, payload, lead=lead)])
        return values
    return received
