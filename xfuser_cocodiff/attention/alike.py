"""Tokens that all ranks hold alike, as those of a text that does not divide among them: every rank has their Q, K and
V, which need not travel then.

Which they are is seen by their fingerprints, in two calls of a layer that ranks compare. From then on a rank puts its
own in the places of the others', and no bit changes as long as they are alike. Ranks compare what they have put there
after every step; should it ever differ, everything travels again.
"""

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from xfuser_cocodiff.attention.reshard import HEADS, SEQUENCE
from xfuser_cocodiff.attention.ulysses import Attend
from xfuser_cocodiff.codec.codecs import fingerprint
from xfuser_cocodiff.exchange.head_group import HeadGroup

Size = tuple[int, ...]
"""Of a tensor, but for its heads, which may be padded."""
LOOKS = 2
"""Calls of a layer in which tokens have to be alike."""
PAYS = 0.05
"""Share of a tensor's tokens from which on it pays to leave them out."""
_ODD = 0x9E3779B97F4A7C15 - 2**64
"""Numbers of a step are strung together by it, so that their order counts too; it is odd, so that no bit gets lost."""


class Ends(NamedTuple):
    """Tokens of a tensor that are alike on all ranks: so many at its front, and so many at its rear."""

    front: int = 0
    rear: int = 0

    @classmethod
    def of(cls, is_alike: torch.Tensor) -> "Ends":
        """Those of tokens (S), of which at least one travels."""
        leading, trailing = (int(each.cumprod(0).sum()) for each in (is_alike.int(), is_alike.int().flip(0)))
        most = len(is_alike) - 1
        found = cls(min(leading, most), min(trailing, most - min(leading, most)))
        return found if sum(found) >= PAYS * len(is_alike) else cls()

    def without(self, tensor: torch.Tensor) -> torch.Tensor:
        """What travels of (B, H, S, D)."""
        return tensor[:, :, self.front : tensor.shape[SEQUENCE] - self.rear]

    def left_out(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What does not, front and rear."""
        return [tensor[:, :, : self.front], tensor[:, :, tensor.shape[SEQUENCE] - self.rear :]]

    def least(self, other: "Ends") -> "Ends":
        """What both say."""
        return Ends(min(self.front, other.front), min(self.rear, other.rear))


@dataclass(frozen=True)
class Alike:
    """What is known of a layer's Q, K and V, for as long as they have so many tokens."""

    sizes: tuple[Size, ...]
    ends: tuple[Ends, ...]
    """Of each."""
    looks: int
    """Calls in which this was so."""

    @property
    def holds(self) -> bool:
        """Whether something is left out."""
        return self.looks >= LOOKS and any(map(sum, self.ends))

    def without(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What travels of Q, K and V."""
        return [ends.without(tensor) for ends, tensor in zip(self.ends, tensors, strict=True)]

    def total(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """One number for all that does not travel of Q, K and V, int64."""
        left = [part for tensor, ends in zip(tensors, self.ends, strict=True) for part in ends.left_out(tensor)]
        return torch.stack([fingerprint(part[None]).sum() * (2 * place + 1) for place, part in enumerate(left)]).sum()


class AlikeTokens:
    """The tokens of an engine's layers that are alike. All ranks that share a sequence must call its methods alike.

    Args:
        same: given numbers, int64, whether each is the same on all ranks; bool of that shape.
        differ: told when tokens that were left out were not alike after all.
    """

    def __init__(self, same: Callable[[torch.Tensor], torch.Tensor], differ: Callable[[], None]) -> None:
        self._same, self._differ = same, differ
        self._known: weakref.WeakKeyDictionary[Hashable, Alike] = weakref.WeakKeyDictionary()
        self._total: torch.Tensor | None = None
        """Of what was left out in this step; None where nothing was."""
        self._is_off = False

    def of(self, layer: Hashable, tensors: Sequence[torch.Tensor]) -> Alike | None:
        """What is left out of Q, K and V in a layer; None where they travel whole. Where V goes first, it is asked of V
        alone."""
        found = self._known.get(layer)
        if self._is_off or found is None or not found.holds:
            return None
        return found if found.sizes[-len(tensors) :] == _sizes(tensors) else None

    def look(self, layer: Hashable, tensors: Sequence[torch.Tensor]) -> None:
        """See which tokens of Q, K and V are alike, while that is not known."""
        before = self._known.get(layer)
        if before and before.sizes != _sizes(tensors):
            before = None
        if self._is_off or (before and before.looks >= LOOKS):
            return
        found = torch.cat([fingerprint(tensor[None])[0] for tensor in tensors], 1).cpu()  # (B, tokens of all three)
        tokens = [tensor.shape[SEQUENCE] for tensor in tensors]
        ends = [Ends.of(each) for each in self._same(found).all(0).split(tokens)]
        if before:
            ends = [one.least(other) for one, other in zip(ends, before.ends, strict=True)]
        self._known[layer] = Alike(_sizes(tensors), tuple(ends), before.looks + 1 if before else 1)

    def left_out(self, alike: Alike, tensors: Sequence[torch.Tensor]) -> None:
        """Some of Q, K and V does not travel."""
        total = alike.total(tensors)
        self._total = total if self._total is None else self._total * _ODD + total

    def end_step(self) -> None:
        """See whether what was left out in a step was alike."""
        if self._total is None:
            return
        total, self._total = self._total, None
        if not self._same(total.cpu().view(1)).all():
            self._is_off = True
            self._differ()


def _sizes(tensors: Sequence[torch.Tensor]) -> tuple[Size, ...]:
    return tuple((tensor.shape[0], *tensor.shape[SEQUENCE:]) for tensor in tensors)


def putting_back(attend: Attend, tensors: Sequence[torch.Tensor], alike: Alike, ranks: int, here: int) -> Attend:
    """Attention of Q, K and V that have come without what is alike.

    Args:
        attend: attention of all tokens.
        tensors: Q, K and V of this rank, whole.
        alike: what is left out of them.
        ranks: of the Ulysses group.
        here: this one's place in it, by which it has its heads.
    """

    def whole(received: torch.Tensor, own: torch.Tensor, ends: Ends, head_group: HeadGroup) -> torch.Tensor:
        if not sum(ends):
            return received
        mine = head_group.of(own.unflatten(HEADS, (ranks, -1))[:, here], HEADS)
        front, rear = (part.unsqueeze(SEQUENCE).expand(-1, -1, ranks, -1, -1) for part in ends.left_out(mine))
        by_source = received.unflatten(SEQUENCE, (ranks, -1))
        return torch.cat([front, by_source, rear], SEQUENCE + 1).flatten(SEQUENCE, SEQUENCE + 1)

    def attend_whole(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_group: HeadGroup
    ) -> torch.Tensor:
        received = zip((query, key, value), tensors, alike.ends, strict=True)
        query, key, value = (whole(*each, head_group) for each in received)
        return attend(query, key, value, head_group)

    return attend_whole
