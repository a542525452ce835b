"""Branches of classifier-free guidance that are coded together: one leads, the others follow.

Of a following branch, the difference to the leading branch is coded, against a reference of that difference. The sender
subtracts the true values of the leading branch, and the receiver adds those that it has decoded. So both branches have
the error of the leading one, and most of it cancels in the guided sum, which amplifies errors that differ.

Sizes in shapes: those of codec.py.
"""

from typing import NamedTuple

import torch

from xfuser_cocodiff.engine.codec.codec import Codec
from xfuser_cocodiff.engine.codec.link_reference import LinkReference


class Lead(NamedTuple):
    """The leading branch of a tensor at one end of its links, for a branch that follows it."""

    reference: LinkReference
    """Reference of the leading branch at this end, of its values."""
    is_coded: bool
    """Whether the difference to the leading branch is coded; else the values by themselves."""
    is_kept: bool
    """Whether the difference is left as the reference for the next step."""
    sent: torch.Tensor | None = None
    """At the sender, the values (L, G, H, T, D) that the leading branch has sent in this step, if subtracted."""

    @property
    def base(self) -> torch.Tensor | None:
        """What is subtracted before encoding and added after decoding, (L, G, H, T, D); None if nothing is."""
        if not self.is_coded:
            return None
        return self.reference.values if self.sent is None else self.sent

    def prepare(self, reference: LinkReference, codec: Codec) -> None:
        """Convert the following branch's reference to one of what is coded; both ends do so for a whole message."""
        if not (codec.is_exact or codec.is_keyframe):
            self._rebase(reference, self.is_coded)

    def finish(self, reference: LinkReference) -> None:
        """Convert the following branch's reference to the one that its next step needs."""
        self._rebase(reference, self.is_kept)

    def _rebase(self, reference: LinkReference, is_difference: bool) -> None:
        if is_difference is not reference.is_difference:
            sign = -1 if is_difference else 1
            reference.advance(reference.values + sign * self.reference.values, is_difference)
