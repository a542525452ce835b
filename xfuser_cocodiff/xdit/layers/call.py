"""A call of an attention layer that is under way."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from xfuser_cocodiff.attention.schedule import Schedule
from xfuser_cocodiff.codec.layer_codecs import LayerCodecs
from xfuser_cocodiff.exchange.lane import Handle
from xfuser_cocodiff.xdit.layers.kind import Kind
from xfuser_cocodiff.xdit.layers.later import Later


class Ahead(NamedTuple):
    """A projection that was made ahead of time."""

    given: torch.Tensor
    returned: torch.Tensor


@dataclass
class Call:
    """A call under way: from where its block begins to where it ends."""

    schedule: Schedule
    kind: Kind | None = None
    mlp_given: torch.Tensor | None = None
    """Input of the block's parallel MLP, if that was called before the module."""
    hidden: torch.Tensor | None = None
    text: torch.Tensor | None = None
    """Arguments of the module that V may come from."""
    ahead: dict[str, Ahead] = field(default_factory=dict)
    """Projections of V that were made ahead of time, by path."""
    asked: set[str] = field(default_factory=set)
    """Those of them that the processor has asked for since."""
    handle: Handle | None = None
    """V's exchange."""
    layer_codecs: LayerCodecs | None = None
    """How its exchanges are encoded, once one of them was."""
    later: list[Later] = field(default_factory=list)
    """Parts of the block's MLP that were asked for and not computed yet."""

    def catch_up(self) -> None:
        """Compute what was put off."""
        for one in self.later:
            one.made()
        self.later.clear()

    def abandon(self) -> None:
        """Forget what was done ahead."""
        handle, self.handle, self.ahead = self.handle, None, {}
        if handle:
            handle.abandon()
