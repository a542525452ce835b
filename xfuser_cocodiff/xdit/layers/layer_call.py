"""Calls of attention layers, from their start to their end."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from xfuser_cocodiff.engine.attention.overlap_schedule import OverlapSchedule
from xfuser_cocodiff.engine.attention.ulysses import UlyssesAttention
from xfuser_cocodiff.engine.comm.comm_stream import Handle
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs
from xfuser_cocodiff.xdit.layers.layer_signature import LayerSignature, LayerStructure, hidden_states
from xfuser_cocodiff.xdit.layers.root_module import BaseLayer


@dataclass(eq=False)
class LayerCall:
    """A call of a layer, in eager mode or in a graph."""

    schedule: OverlapSchedule
    signature: LayerSignature | None = None
    layer_codecs: LayerCodecs | None = None
    """Codecs of its communication, once the first message was encoded."""
    is_restarted: bool = False
    """Whether references of another number of head groups were dropped, so that it sends a keyframe."""

    def use_codecs(self, layer_codecs: LayerCodecs, groups: int) -> None:
        """Use codecs, and drop references of another number of head groups: memory holds those of one number."""
        self.layer_codecs, link_states = layer_codecs, layer_codecs.link_states
        others = [(name, head_group) for name, head_group in link_states if head_group.count != groups]
        for key in others:
            del link_states[key]
        self.is_restarted |= bool(others)

    def end(self) -> None:
        """Count the call in the candidates of its signature."""
        if self.signature and self.signature.candidates:
            # A step without references has other messages than the steps that are to be timed.
            is_keyframe = self.layer_codecs is not None and self.layer_codecs.is_keyframe
            self.signature.candidates.count_call(is_representative=not (is_keyframe or self.is_restarted))


@dataclass(eq=False, kw_only=True)
class TracedCall(LayerCall):
    """A call in a compiled graph."""

    layer: BaseLayer | None
    """Layer of the call; None where the graph runs outside of any module."""
    ulysses: UlyssesAttention


class Projection(NamedTuple):
    """A projection that has run."""

    input: torch.Tensor
    output: torch.Tensor
    version: int
    """Version counter of the output when it was computed."""

    @classmethod
    def of(cls, forward: Callable, given: torch.Tensor) -> "Projection":
        """Compute a projection, outside of inference mode, whose tensors have no version counter."""
        has_grad = torch.is_grad_enabled()  # read first: inference mode sets its own
        with torch.inference_mode(False), torch.set_grad_enabled(has_grad):
            output = forward(given)
        return cls(given, output, output._version)

    @property
    def is_written(self) -> bool:
        """Whether the output has been written since."""
        return self.output._version != self.version


@dataclass(eq=False, kw_only=True)
class EagerCall(LayerCall):
    """A call of an attention module in eager mode."""

    arguments: dict[str, torch.Tensor]
    """Tensors that the module was called with, by name."""
    observes: bool
    """Whether the call shows where V comes from, so that it is not sent early."""
    query_input: torch.Tensor | None = None
    """Input of Q's projection, once it has been called."""
    early: dict[str, Projection] = field(default_factory=dict)
    """Early projections of V, by path."""
    requested: dict[str, Projection] = field(default_factory=dict)
    """Projections of V that the processor has asked for, by path."""
    v_handle: Handle | None = None
    """Handle of V's all-to-all; drained at the end of the call, since an error may come before USP waits for it."""
    v_kind: tuple[torch.Size, torch.dtype] | None = None
    """Shape and dtype of the V that was sent."""

    @property
    def structure(self) -> LayerStructure:
        """Structure of the layer."""
        return self.signature.structure

    @property
    def num_hidden(self) -> int:
        """Number of hidden states."""
        hidden = hidden_states(self.arguments)
        return 0 if hidden is None else hidden.shape[-2]

    @property
    def outputs(self) -> dict[str, torch.Tensor]:
        """Outputs of the projections that the processor has asked for, by path."""
        return {path: each.output for path, each in self.requested.items()}

    def drain(self) -> None:
        """Drop the projections, and wait for V's all-to-all unless USP has."""
        handle, self.v_handle = self.v_handle, None
        self.early.clear()
        self.requested.clear()
        if handle:
            handle.drain()
