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
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch.nn import functional

from xfuser_cocodiff.engine.codec import coded_tensor, kernels, yardsticks
from xfuser_cocodiff.engine.codec.codec import ALIGNMENT, EXACT, message_layout
from xfuser_cocodiff.engine.codec.coded_tensor import CodedTensor
from xfuser_cocodiff.engine.codec.rows import Int8Rows
from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS
from xfuser_cocodiff.engine.compression.axis_partition import AxisLayout
from xfuser_cocodiff.engine.compression.coding_choice import active_tokens_for, choose
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes
from xfuser_cocodiff.engine.compression.step_errors import TensorError
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.tools.comparison.segments import segments
from xfuser_cocodiff.tools.launching import single_rank

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
        """Return attention on tensors with the compression error of all virtual ranks; see :class:`Simulator`."""
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
        sources, targets = zip(*itertools.permutations(range(self.layout.num_slow), 2), strict=True)
        values = rows[sources, targets].flatten(0, 1).flatten(1, 2)
        sent = rows.clone()
        received = _through_codec(name, values, layer_codecs)
        sent[sources, targets] = received.view(len(sources), *rows.shape[2:])
        split = sent.permute(*map(order.index, range(4)), 4, 5, 6, 7)
        shards = self._join(split, 2 + _HEAD_DIM)
        sizes = [part.shape[_TOKEN_DIM] // self.topology.size for part in parts]
        return [self._join(shard, _TOKEN_DIM) for shard in shards.split(sizes, 2 + _TOKEN_DIM)]

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
        coded = [
            self._transmit_blocks(name, tensor, segments, layer_codecs)
            for name, tensor in zip("vk", exact[::-1], strict=True)
        ]
        slow_indices = self._slow_indices_of(segments, query.device)[:, None]
        result = None
        for slow_index in range(self.layout.num_slow):
            is_own = slow_indices == slow_index
            key, value = (torch.where(is_own, *pair) for pair in zip(exact, coded[::-1], strict=True))
            output = attention(query, key, value)
            result = output if result is None else torch.where(is_own, output, result)
        return result

    def _slow_indices_of(self, segments: Sequence[int], device: torch.device) -> torch.Tensor:
        """Return the slow coordinate of each token's rank, int64 (N); 0 for replicated tokens."""
        of_rank = torch.arange(self.topology.size) // self.layout.num_fast
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
        received = _through_codec(name, sent, layer_codecs, self.layout.num_slow - 1)
        received = self._reshard_back(received, tensor.shape[_HEAD_DIM])
        for index, part in zip(sharded, received.split([block.shape[3] for block in blocks], 3), strict=True):
            parts[index] = part.permute(1, 2, 0, 3, 4).flatten(_TOKEN_DIM, _TOKEN_DIM + 1)
        return torch.cat(parts, _TOKEN_DIM)

    def _reshard_along_fast(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return each rank's tokens (P, B, H, T, D) as it sends them: by heads along the fast axes, zero-padded where
        these do not divide the heads, (P, B, h, F * T, D)."""
        padded = functional.pad(blocks, (0, 0, 0, 0, 0, -blocks.shape[2] % self.layout.num_fast))
        by_slow = padded.unflatten(0, self._shape)  # (S, F, B, H, T, D)
        by_heads = by_slow.unflatten(3, (self.layout.num_fast, -1)).permute(0, 3, 2, 4, 1, 5, 6)
        return by_heads.flatten(4, 5).flatten(0, 1)

    def _reshard_back(self, sent: torch.Tensor, heads: int) -> torch.Tensor:
        """Return what was sent (P, B, h, F * T, D) as each rank's tokens (P, B, H, T, D)."""
        by_heads = sent.unflatten(0, (self.layout.num_slow, -1)).unflatten(4, (self.layout.num_fast, -1))
        by_slow = by_heads.permute(0, 4, 2, 1, 3, 5, 6).flatten(3, 4)[:, :, :, :heads]
        return by_slow.flatten(0, 1)


class VirtualRing(VirtualRanks):
    """Simulated ranks of a ring."""

    is_ring = True

    def _reshard_along_fast(self, blocks: torch.Tensor) -> torch.Tensor:
        return blocks

    def _reshard_back(self, sent: torch.Tensor, heads: int) -> torch.Tensor:
        return sent


@torch.no_grad()
def _through_codec(name: str, values: torch.Tensor, layer_codecs: LayerCodecs, copies: int = 1) -> torch.Tensor:
    """Return values (L, G, H, T, D) as receivers decode them, and add to the statistics.

    Args:
        name: the tensor's letter.
        values: values by link.
        layer_codecs: codecs of the layer.
        copies: number of receivers of each link's values.
    """
    state, stats, errors = layer_codecs.link_state(name, ALL_HEADS), layer_codecs.stats, layer_codecs.errors
    codec, lead = choose(layer_codecs, name, ALL_HEADS, values.shape, values.dtype)
    reference, leader, error = state.sent, layer_codecs.leader_of(name, ALL_HEADS), None
    if not codec.is_exact:
        sent = leader.sent_values if leader and lead and lead.is_coded else None
        error = TensorError(name, layer_codecs.layer, layer_codecs.counts_errors, sent.error if sent else None)
    if lead:
        lead.prepare(reference, codec)
    active = active_tokens_for(layer_codecs, name, ALL_HEADS, values, codec) if codec.selects_tokens else None
    if leader is None:
        layer_codecs.note_sent(name, ALL_HEADS, values, None, error)
    if layer_codecs.step.measures_yardsticks and error:
        measured = yardsticks.measure(values)
        energies = errors.add([TensorError(each, layer_codecs.layer) for each in measured], values.device)
        for row, of_yardstick in zip(energies, measured.values(), strict=True):
            row.copy_(of_yardstick)
    layout = message_layout(((name, codec, values.shape),), values.dtype)
    payload = values.new_empty(len(values), codec.payload_bytes(values.shape, values.dtype), dtype=torch.uint8)
    stats.sent_bytes += copies * len(values) * (layout.nbytes - ALIGNMENT)
    stats.exact_bytes += copies * values.nbytes
    tensor = CodedTensor(values, reference, codec, active, payload, None, lead)
    energies = errors.add([error] if error else [], values.device)
    if tensor.is_quantized:
        received = _round_trip(tensor, energies)
    else:
        coded_tensor.encode([tensor], energies)
        received = values if codec.is_exact else reference.values
    if error and not energies[:, 0].isfinite().all():
        stats.repeated += 1
        state.drop_kept()
        payload = torch.empty_like(values).flatten(1).view(torch.uint8)
        alone = lead and lead._replace(is_coded=False)
        coded_tensor.encode([CodedTensor(values, reference, EXACT, None, payload, lead=alone)], energies[:0])
        received = values
    layer_codecs.drop_references(name, ALL_HEADS)
    return received


def _round_trip(tensor: CodedTensor, energies: torch.Tensor) -> torch.Tensor:
    """Return the values (L, G, H, T, D) decoded of a quantized tensor, for a reference that both ends share."""
    part, target = tensor.part, torch.empty_like(tensor.values)
    reference, decoded = (Int8Rows(*map(torch.empty_like, part.new_reference)) for _ in range(2))
    kernels.encode([part._replace(new_reference=reference)], energies)
    base = tensor.lead.reference.values if tensor.lead and tensor.lead.is_coded else None
    kernels.decode([part._replace(values=target, base=base, new_reference=decoded)])
    tensor.advance(part._replace(new_reference=reference))
    return target
