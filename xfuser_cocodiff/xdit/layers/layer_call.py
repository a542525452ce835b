"""Calls of attention layers, from their start to their end."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from xfuser_cocodiff.engine.attention.overlap_schedule import OverlapSchedule
from xfuser_cocodiff.engine.comm.comm_stream import Handle
from xfuser_cocodiff.engine.compression.layer_codecs import LayerCodecs
from xfuser_cocodiff.xdit.layers.layer_signature import LayerSignature, hidden_states
from xfuser_cocodiff.xdit.layers.model_projections import Projection, Recipe


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


QUERY_INPUT = "input of Q"
"""Name of the tensor that Q is projected from, among the arguments of a call, once it is known."""


@dataclass(eq=False, kw_only=True)
class EagerCall(LayerCall):
    """A call of an attention module in eager mode."""

    arguments: dict[str, torch.Tensor]
    """Tensors that the module was called with, by name."""
    recipe: Recipe | None
    """How V is built, if it is sent early."""
    early: dict[str, Projection] = field(default_factory=dict)
    """Early projections of V, by path, until V reaches USP."""
    requested: dict[str, Projection] = field(default_factory=dict)
    """Projections of V that the processor has asked for, by path."""
    v_handle: Handle | None = None
    """Handle of V's all-to-all; drained at the end of the call, since an error may come before USP waits for it."""
    v_kind: tuple[torch.Size, torch.dtype] | None = None
    """Shape and dtype of the V that was sent."""

    @property
    def num_hidden(self) -> int:
        """Number of hidden states."""
        hidden = hidden_states(self.arguments)
        return 0 if hidden is None else hidden.shape[-2]

    def request(self, path: str, forward: Callable, given: torch.Tensor) -> torch.Tensor:
        """Return the output of a projection of V: the early one if its input was the same."""
        projection = self.early.get(path)
        if projection is None or projection.input is not given:
            argument = next((name for name, tensor in self.arguments.items() if tensor is given), None)
            has_grad = torch.is_grad_enabled()  # read first: inference mode sets its own
            # Tensors of inference mode have no version counter.
            with torch.inference_mode(False), torch.set_grad_enabled(has_grad):
                output = forward(given)
            projection = Projection(argument, given, output, output._version)
        self.requested[path] = projection
        return projection.output

    def drain(self) -> None:
        """Drop the projections, and wait for V's all-to-all unless USP has."""
        self.early.clear()
        self.requested.clear()
        if self.v_handle:
            self.v_handle.drain()
