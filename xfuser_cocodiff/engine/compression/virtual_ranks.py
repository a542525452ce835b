"""Virtual ranks: one rank applies what codecs would do among many, so that quality can be judged without a cluster.
They are those of a Ulysses group, or those of a ring.

Every row of an exchanged tensor, one token of one head, has one rank that it comes from and one that it goes to. Those
that would cross a slow axis go through the codec, against one reference in the place of the two at its ends.

Sizes in shapes: P virtual ranks at S places on slow axes and F on fast ones, B batch, H heads, N tokens, D head dim.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch

from xfuser_cocodiff.engine.comm.head_group import ALL_HEADS
from xfuser_cocodiff.engine.compression import codecs
from xfuser_cocodiff.engine.compression.axis_partition import AxisLayout
from xfuser_cocodiff.engine.compression.codecs import EXACT
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs, active_for, codec_for, is_finite
from xfuser_cocodiff.engine.topology.topology import Topology

_HEADS, _TOKENS = 1, 2
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From Q, K and V to O, (B, H, N, D) each."""


@dataclass(frozen=True)
class VirtualRanks:
    """Ranks that there are not, and which of their axes are slow."""

    topology: Topology
    slow_axes: tuple[str, ...]
    is_ring: ClassVar[bool] = False
    """Whether K and V alone travel, each block to all others."""

    @functools.cached_property
    def _axes(self) -> AxisLayout:
        slow = [dim for dim, axis in enumerate(self.topology.axes) if axis.name in self.slow_axes]
        return AxisLayout(tuple(slow), self.topology.shape)

    @property
    def num_slow(self) -> int:
        """On slow axes."""
        return self._axes.num_slow

    def is_divisible(self, size: int) -> bool:
        """Whether so many heads, or tokens of a segment, can be dealt to the ranks."""
        return size % self.topology.size == 0

    def shard_fraction(self, shape: Sequence[int], segments: Sequence[int]) -> Fraction:
        """Of tensors (B, H, N, D) with such segments of tokens, what one of the ranks would have to exchange."""
        is_dealt = self.is_ring or self.is_divisible(shape[_HEADS])
        dealt = sum(size for size in segments if self.is_divisible(size)) if is_dealt else 0
        return Fraction(dealt, shape[_TOKENS] * self.topology.size)

    def attend(
        self, tensors: Sequence[torch.Tensor], segments: Sequence[int], layer_codecs: LayerCodecs, attention: Attention
    ) -> torch.Tensor:
        """Attention as many ranks would have it together.

        Args:
            tensors: Q, K and V, (B, H, N, D) each.
            segments: see :meth:`transmit`.
            layer_codecs: how to encode.
            attention: from Q, K and V to O.
        """
        attended = attention(*self.transmit("qkv", tensors, segments, layer_codecs))
        return self.transmit("o", [attended], segments, layer_codecs)[0]

    def transmit(
        self, names: str, tensors: Sequence[torch.Tensor], segments: Sequence[int], layer_codecs: LayerCodecs
    ) -> list:
        """What many ranks would get of tensors (B, H, N, D) if all of them were put together again.

        Args:
            names: a letter for each: q, k, v, which are dealt by tokens and go to heads, or o, the other way round.
            tensors: all that there is.
            segments: parts of the tokens, such as text and image, of each of which every rank has its share. Those that
                cannot be dealt stay as they are: xDiT gives them to every rank as a whole.
            layer_codecs: how to encode.
        """
        found = {}
        for name, tensor in sorted(zip(names, tensors, strict=True), key=lambda pair: pair[0] != "v"):
            parts = list(tensor.split(list(segments), _TOKENS))
            dealt = [place for place, size in enumerate(segments) if self.is_divisible(size)]
            if dealt and self.is_divisible(tensor.shape[_HEADS]):
                sent = self._sent(name, [parts[place] for place in dealt], layer_codecs)
                for place, part in zip(dealt, sent, strict=True):
                    parts[place] = part
            found[name] = torch.cat(parts, _TOKENS)
        return [found[name] for name in names]

    def _sent(self, name: str, parts: list[torch.Tensor], layer_codecs: LayerCodecs) -> list[torch.Tensor]:
        """Segments (B, H, N, D) of which all that crosses slow axes has gone through the codec."""
        order = (2, 0, 1, 3) if name != "o" else (0, 2, 3, 1)  # source S, target S, target F, source F
        shares = torch.cat([self._split(part, _TOKENS) for part in parts], 2 + _TOKENS)
        dealt = self._split(shares, 2 + _HEADS)  # (S, F, S, F, B, n, s, D): heads, then tokens
        rows = dealt.permute(*order, 4, 5, 6, 7)
        sources, targets = zip(
            *((a, b) for a in range(self.num_slow) for b in range(self.num_slow) if a != b), strict=True
        )
        values = rows[sources, targets].flatten(0, 1).flatten(1, 2)
        sent = rows.clone()
        sent[sources, targets] = _coded(name, values, layer_codecs).view(len(sources), *rows.shape[2:])
        back = sent.permute(*map(order.index, range(4)), 4, 5, 6, 7)
        shares = self._joined(back, 2 + _HEADS)
        sizes = [part.shape[_TOKENS] // self.topology.size for part in parts]
        return [self._joined(share, _TOKENS) for share in shares.split(sizes, 2 + _TOKENS)]

    def _split(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """View (..., P * n, ...) as (S, F, ..., n, ...)."""
        by_axis, levels = tensor.unflatten(dim, (*self.topology.shape, -1)), len(self.topology.shape)
        return self._axes.split(by_axis.movedim([*range(dim, dim + levels)], [*range(levels)]))

    def _joined(self, split: torch.Tensor, dim: int) -> torch.Tensor:
        """The inverse of :meth:`_split`."""
        by_axis, levels = self._axes.join(split), len(self.topology.shape)
        return by_axis.movedim([*range(levels)], [*range(dim, dim + levels)]).flatten(dim, dim + levels)


class VirtualRing(VirtualRanks):
    """The ranks of a ring: each attends with Q of its own tokens to K and V as they come to it, which is as they are
    from ranks at its place on slow axes, and coded from all others."""

    is_ring = True

    def attend(
        self, tensors: Sequence[torch.Tensor], segments: Sequence[int], layer_codecs: LayerCodecs, attention: Attention
    ) -> torch.Tensor:
        """See :class:`VirtualRanks`. Of tokens that every rank has, O is that of the ranks at the first place."""
        query, *given = tensors
        coded = [
            self._seen(name, tensor, segments, layer_codecs) for name, tensor in zip("vk", given[::-1], strict=True)
        ]
        places = self._places_of(segments, query.device)[:, None]
        result = None
        for place in range(self.num_slow):
            own = places == place
            key, value = (torch.where(own, *pair) for pair in zip(given, coded[::-1], strict=True))
            attended = attention(query, key, value)
            result = attended if result is None else torch.where(own, attended, result)
        return result

    def _places_of(self, segments: Sequence[int], device: torch.device) -> torch.Tensor:
        """For each token the place on slow axes of the rank that it is dealt to, the first one where all have it."""
        of_rank = torch.empty(self.topology.size, dtype=torch.long)
        of_rank[torch.tensor(self._axes.ranks_by_slow_index)] = torch.arange(self.num_slow)[:, None]
        found = [
            of_rank.repeat_interleave(size // self.topology.size)
            if self.is_divisible(size)
            else torch.zeros(size).long()
            for size in segments
        ]
        return torch.cat(found).to(device)

    def _seen(
        self, name: str, tensor: torch.Tensor, segments: Sequence[int], layer_codecs: LayerCodecs
    ) -> torch.Tensor:
        """What others see of a tensor (B, H, N, D): a block of each rank, of which the others all get the same."""
        size, parts = self.topology.size, list(tensor.split(list(segments), _TOKENS))
        dealt = [number for number, part in enumerate(segments) if self.is_divisible(part)]
        if not dealt:
            return tensor
        blocks = [parts[number].unflatten(_TOKENS, (size, -1)).permute(2, 0, 1, 3, 4) for number in dealt]
        found = _coded(name, torch.cat(blocks, 3), layer_codecs, self.num_slow - 1)
        for number, part in zip(dealt, found.split([block.shape[3] for block in blocks], 3), strict=True):
            parts[number] = part.permute(1, 2, 0, 3, 4).flatten(_TOKENS, _TOKENS + 1)
        return torch.cat(parts, _TOKENS)


def _coded(name: str, values: torch.Tensor, layer_codecs: LayerCodecs, copies: int = 1) -> torch.Tensor:
    """What arrives of values (L, G, H, T, D) that go through the codec, each link to so many."""
    codec = codec_for(layer_codecs, name, ALL_HEADS, values.shape, values.dtype)
    reference = layer_codecs.link_state(name, ALL_HEADS).sent
    active = active_for(layer_codecs, name, ALL_HEADS, values, codec)
    sizes = codecs.section_bytes(codec, name, values.shape, values.dtype)
    payload = values.new_empty(len(values), sizes[1], dtype=torch.uint8)
    loss = codecs.encode(values, reference, codec, active, payload)
    layer_codecs.stats.sent_bytes += copies * len(values) * sum(map(codecs.aligned, sizes))
    layer_codecs.stats.exact_bytes += copies * values.nbytes
    if loss:
        layer_codecs.stats.losses.append(loss)
    if loss and not is_finite(loss):
        layer_codecs.stats.repeated += 1
        codecs.encode(values, reference, EXACT, None, torch.empty_like(values).flatten(1).view(torch.uint8))
        return values
    return values if codec.is_exact else reference.expected()
