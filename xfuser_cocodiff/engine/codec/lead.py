"""Branches of classifier-free guidance that are coded together: one leads, the others follow.

Of a following branch, the difference to the leading branch is coded, against a reference of that difference. The sender
subtracts the true values of the leading branch, and the receiver adds those that it has decoded. So both branches have
the error of the leading one, and most of it cancels in the guided sum, which amplifies errors that differ.

Sizes in shapes: those of codec.py.
"""

from typing import NamedTuple

import torch

from xfuser_cocodiff.engine.codec.codec import Codec
from xfuser_cocodiff.engine.codec.link_reference import LinkReference, SentValues


class Lead(NamedTuple):
    """The leading branch of a tensor at one end of its links, for a branch that follows it."""

    reference: LinkReference
    """Reference of the leading branch at this end; its weight is 0."""
    weight: float
    """Weight of the leading branch in the difference that is coded; 0 to code the values by themselves."""
    next_weight: float
    """Weight of the leading branch in the reference that is left for the next step."""
    sent: SentValues | None = None
    """At the sender, the values that the leading branch has sent in this step, if they are subtracted."""

    @property
    def base(self) -> torch.Tensor | None:
        """What is subtracted before encoding and added after decoding, (L, G, H, T, D); None if nothing is."""
        if not self.weight:
            return None
        return self.decoded if self.sent is None else self.sent.kept

    @property
    def decoded(self) -> torch.Tensor:
        """What both ends hold of the leading branch, (L, G, H, T, D)."""
        return self.reference.values

    def alone(self) -> "Lead":
        """Return the lead of a tensor whose values are coded by themselves after all."""
        return self._replace(weight=0.0, sent=None)

    def prepare(self, reference: LinkReference, codec: Codec) -> None:
        """Convert the following branch's reference to one of what is coded; both ends do so for a whole message."""
        if not codec.is_stateless:
            self.rebase(reference, self.weight)

    def rebase(self, reference: LinkReference, weight: float) -> None:
        """Convert the following branch's reference to one with another weight of the leading branch."""
        if weight != reference.weight:
            reference.advance(reference.values + self.decoded * (reference.weight - weight), weight)


def decoded_values(reference: LinkReference, lead: Lead | None) -> torch.Tensor:
    """Return the values that receivers have decoded, (L, G, H, T, D)."""
    decoded = reference.values
    if lead is None or not reference.weight:
        return decoded
    return (decoded.float() + reference.weight * lead.decoded.float()).to(decoded.dtype)
