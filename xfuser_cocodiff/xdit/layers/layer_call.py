"""Calls of attention layers that are under way."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from xfuser_cocodiff.engine.attention.overlap_schedule import OverlapSchedule
from xfuser_cocodiff.engine.attention.ulysses import AttentionAllToAlls
from xfuser_cocodiff.engine.comm.comm_stream import Handle
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs
from xfuser_cocodiff.xdit.layers.deferred import Deferred
from xfuser_cocodiff.xdit.layers.layer_signature import LayerSignature
from xfuser_cocodiff.xdit.layers.root_module import BaseLayer


@dataclass(eq=False)
class LayerCall:
    """A call of a layer, in eager mode or in a graph."""

    schedule: OverlapSchedule
    signature: LayerSignature | None = None
    layer_codecs: LayerCodecs | None = None
    """How its exchanges are encoded, once one of them was."""

    def ended(self) -> None:
        """Count it in the trial of its kind."""
        if self.signature and self.signature.candidates:
            # A refresh says nothing of steps that are encoded by what was sent before.
            is_refresh = self.layer_codecs is not None and self.layer_codecs.is_stateless
            self.signature.candidates.count_call(is_representative=not is_refresh)


@dataclass(eq=False, kw_only=True)
class TracedCall(LayerCall):
    """A call in a compiled graph."""

    layer: BaseLayer | None
    """None where no module is called, of which there is nothing to learn then."""
    exchanges: AttentionAllToAlls


class Ahead(NamedTuple):
    """A projection that was made ahead of time."""

    given: torch.Tensor
    returned: torch.Tensor
    version: int
    """How often it had been written by then."""

    @classmethod
    def of(cls, forward: Callable, given: torch.Tensor) -> "Ahead":
        """Project. What is returned counts how often it is written, which tensors of inference mode do not."""
        has_grad = torch.is_grad_enabled()  # before the mode, which has its own
        with torch.inference_mode(False), torch.set_grad_enabled(has_grad):
            returned = forward(given)
        return cls(given, returned, returned._version)

    @property
    def is_written(self) -> bool:
        """Whether it has been written since."""
        return self.returned._version != self.version


@dataclass(eq=False)
class Call(LayerCall):
    """A call of a module: from where its block begins to where it ends."""

    hidden: torch.Tensor | None = None
    text: torch.Tensor | None = None
    """Arguments of the module that V may come from."""
    ahead: dict[str, Ahead] = field(default_factory=dict)
    """Projections of V that were made ahead of time, by path."""
    asked: dict[str, Ahead] = field(default_factory=dict)
    """What the processor was given of them since."""
    is_attended: bool = False
    """Whether its V has reached USP."""
    handle: Handle | None = None
    """V's exchange, brought to its end with the call whoever waits for it: an error may come in between."""
    deferred: list[Deferred] = field(default_factory=list)
    """Parts of the block's MLP that were asked for and not computed yet."""

    def compute_deferred(self) -> None:
        """Compute what was put off."""
        for one in self.deferred:
            one.made()
        self.deferred.clear()

    def drain(self) -> None:
        """Forget what was done ahead."""
        handle, self.handle, self.ahead, self.asked = self.handle, None, {}, {}
        if handle:
            handle.drain()
