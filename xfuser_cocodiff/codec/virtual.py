"""Virtual ranks: one rank applies what codecs would do among many, so that quality can be judged without a cluster.

Every row of an exchanged tensor, one token of one head, has one rank that it comes from and one that it goes to. Those
that would cross a slow axis go through the codec, against one reference in the place of the two at its ends.

Sizes in shapes: P virtual ranks at S places on slow axes and F on fast ones, B batch, H heads, N tokens, D head dim.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from xfuser_cocodiff.codec import codecs
from xfuser_cocodiff.codec.codecs import EXACT
from xfuser_cocodiff.codec.layer_codecs import LayerCodecs, active_for, codec_for, is_finite
from xfuser_cocodiff.exchange.head_group import ALL_HEADS
from xfuser_cocodiff.machine.topology import Topology

_HEADS, _TOKENS = 1, 2


@dataclass(frozen=True)
class VirtualRanks:
    """Ranks that there are not, and which of their axes are slow."""

    topology: Topology
    slow_axes: tuple[str, ...]

    @functools.cached_property
    def _slow_dims(self) -> list[int]:
        return [dim for dim, axis in enumerate(self.topology.axes) if axis.name in self.slow_axes]

    @functools.cached_property
    def _order(self) -> list[int]:
        return [*self._slow_dims, *(dim for dim in range(len(self.topology.axes)) if dim not in self._slow_dims)]

    @functools.cached_property
    def places(self) -> int:
        """On slow axes."""
        return math.prod(self.topology.shape[dim] for dim in self._slow_dims)

    def deals(self, size: int) -> bool:
        """Whether so many heads, or tokens of a segment, can be dealt to the ranks."""
        return size % self.topology.size == 0

    def share_of(self, shape: Sequence[int], segments: Sequence[int]) -> Fraction:
        """Of tensors (B, H, N, D) with such segments of tokens, what one of the ranks would have to exchange."""
        dealt = sum(size for size in segments if self.deals(size)) if self.deals(shape[_HEADS]) else 0
        return Fraction(dealt, shape[_TOKENS] * self.topology.size)

    def send(
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
            dealt = [place for place, size in enumerate(segments) if self.deals(size)]
            if dealt and self.deals(tensor.shape[_HEADS]):
                sent = self._sent(name, [parts[place] for place in dealt], layer_codecs)
                for place, part in zip(dealt, sent, strict=True):
                    parts[place] = part
            found[name] = torch.cat(parts, _TOKENS)
        return [found[name] for name in names]

    def _sent(self, name: str, parts: list[torch.Tensor], layer_codecs: LayerCodecs) -> list[torch.Tensor]:
        rows = self._rows(parts, to_heads=name != "o")
        return self._parts(
            self._encoded(name, rows, layer_codecs), [part.shape[_TOKENS] for part in parts], name != "o"
        )

    def _encoded(self, name: str, rows: torch.Tensor, layer_codecs: LayerCodecs) -> torch.Tensor:
        """Rows (S, S, F, F, B, n, s, D) of which those off the first diagonal have gone through the codec."""
        sources, targets = zip(*((a, b) for a in range(self.places) for b in range(self.places) if a != b), strict=True)
        values = rows[sources, targets].flatten(0, 1).flatten(1, 2)
        codec = codec_for(layer_codecs, name, ALL_HEADS, values.shape, values.dtype)
        reference = layer_codecs.wire(name, ALL_HEADS).sent
        active = active_for(layer_codecs, name, ALL_HEADS, values, codec)
        sizes = codecs.section_bytes(codec, name, values.shape, values.dtype)
        payload = values.new_empty(len(values), sizes[1], dtype=torch.uint8)
        loss = codecs.encode(values, reference, codec, active, payload)
        layer_codecs.account.sent_bytes += len(values) * sum(map(codecs.aligned, sizes))
        layer_codecs.account.exact_bytes += values.nbytes
        if loss:
            layer_codecs.account.losses.append(loss)
        if loss and not is_finite(loss):
            layer_codecs.account.repeated += 1
            codecs.encode(values, reference, EXACT, None, torch.empty_like(values).flatten(1).view(torch.uint8))
            received = values
        else:
            received = values if codec.is_exact else reference.expected()
        sent = rows.clone()
        sent[sources, targets] = received.view(len(sources), *rows.shape[2:])
        return sent

    def _split(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """View (..., P * n, ...) as (..., S, F, n, ...)."""
        shape, own = tensor.shape, tensor.shape[dim] // self.topology.size
        by_axis = tensor.reshape(*shape[:dim], *self.topology.shape, own, *shape[dim + 1 :])
        levels, ndim = len(self.topology.axes), by_axis.ndim
        order = [*range(dim), *(dim + each for each in self._order), *range(dim + levels, ndim)]
        return by_axis.permute(order).reshape(*shape[:dim], self.places, -1, own, *shape[dim + 1 :])

    def _joined(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The inverse of :meth:`_split`."""
        shape, levels = tensor.shape, len(self.topology.axes)
        sizes = [self.topology.shape[each] for each in self._order]
        by_axis = tensor.reshape(*shape[:dim], *sizes, *shape[dim + 2 :])
        back = sorted(range(levels), key=self._order.__getitem__)
        order = [*range(dim), *(dim + each for each in back), *range(dim + levels, by_axis.ndim)]
        return by_axis.permute(order).flatten(dim, dim + levels)

    def _rows(self, parts: list[torch.Tensor], to_heads: bool) -> torch.Tensor:
        """Segments (B, H, N, D) as (source S, target S, target F, source F, B, n, s, D)."""
        shares = torch.cat([self._split(part, _TOKENS) for part in parts], _TOKENS + 2)
        dealt = self._split(shares, _HEADS)  # (B, S, F, n, S, F, s, D): heads, then tokens
        return dealt.permute(4, 1, 2, 5, 0, 3, 6, 7) if to_heads else dealt.permute(1, 4, 5, 2, 0, 3, 6, 7)

    def _parts(self, rows: torch.Tensor, sizes: Sequence[int], to_heads: bool) -> list[torch.Tensor]:
        """The inverse of :meth:`_rows`."""
        dealt = rows.permute(4, 1, 2, 5, 0, 3, 6, 7) if to_heads else rows.permute(4, 0, 3, 5, 1, 2, 6, 7)
        heads = self._joined(dealt, _HEADS)  # (B, H, S, F, s, D)
        shares = heads.split([size // self.topology.size for size in sizes], _TOKENS + 2)
        return [self._joined(share, _TOKENS) for share in shares]
