"""Attention layers in eager mode, and V-First: V is projected and sent before the processor asks for Q and K.

A table lists the projections that V comes from (:mod:`v_source`). The first call of each structure verifies the layer:
V is projected early, and compared bit for bit with the V that reaches USP. Once all ranks have found them equal, later
calls project V early and start its all-to-all, and the processor gets the finished projection when it asks for it. If
the verified V was a view of the projection, later ones must be views too. All other layers run unchanged.
"""

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from xfuser_cocodiff.engine.attention.overlap_schedule import OverlapSchedule
from xfuser_cocodiff.engine.comm.comm_stream import Handle
from xfuser_cocodiff.xdit.layers.deferred import PARALLEL_MLP, Deferred, has_hooks, has_parallel_mlp, materialize
from xfuser_cocodiff.xdit.layers.forward_wrapper import ForwardWrapper
from xfuser_cocodiff.xdit.layers.layer_call import EagerCall, EarlyProjection
from xfuser_cocodiff.xdit.layers.layer_signature import (
    NOT_THROUGH_USP,
    LayerSignature,
    LayerSignatures,
    LayerStructure,
    hidden_states,
)
from xfuser_cocodiff.xdit.layers.module_stack import named_arguments
from xfuser_cocodiff.xdit.layers.root_module import BaseLayer, RootModule
from xfuser_cocodiff.xdit.layers.v_source import Recipe, Source, find_recipes


@dataclass(eq=False)
class LayerContext:
    """State and callbacks that all layers of a session share."""

    is_active: Callable[[], bool]
    """Returns whether communication may overlap with computation at the moment."""
    send_v: Callable[[torch.Tensor, "Layer"], Handle]
    """Starts the all-to-all of a layer's V, or of its first head group where the call has several."""
    all_agree: Callable[[object], bool]
    """Returns whether all ranks pass the same value; a collective."""
    log: Callable[[str], None]
    """Logs a line at INFO."""
    backend: Callable[[], str]
    """Returns the name of xDiT's attention backend, which may change from step to step."""
    may_send_v_first: bool
    """Whether V may go first; if not, layers are neither verified nor projected early."""
    signatures: LayerSignatures = field(init=False)
    """Signatures of calls so far."""
    current: "Layer | None" = field(init=False, default=None)
    """The layer whose module runs."""

    def __post_init__(self) -> None:
        self.signatures = LayerSignatures(self.may_send_v_first)


class Layer(BaseLayer):
    """An attention module of a transformer, with the block that holds it.

    Args:
        name: path of the module in the transformer.
        module: the attention module.
        block: the module that holds it.
        root: the transformer.
        context: shared with all other layers.
    """

    def __init__(self, name: str, module: nn.Module, block: nn.Module, root: RootModule, context: LayerContext) -> None:
        super().__init__(name, root)
        # Their forwards hold this layer, not the other way round: a cycle would keep weights alive.
        self._module_ref, self._block_ref, self._context = weakref.ref(module), weakref.ref(block), context
        self.call: EagerCall | None = None
        self._signature: LayerSignature | None = None
        """Signature of the last call."""
        self._is_projecting_early = False
        self._wrappers: weakref.WeakKeyDictionary[nn.Module, ForwardWrapper] = weakref.WeakKeyDictionary()
        self._has_parallel_mlp = has_parallel_mlp(block)

    @property
    def _module(self) -> nn.Module:
        return self._module_ref()

    def belongs_to(self, module: nn.Module) -> bool:
        """Return whether this is the layer of a module."""
        return self._module_ref() is module

    def install(self) -> None:
        """Wrap the forwards of the block and the module, which hold this layer from then on."""
        block = self._block_ref()
        self._wrap(block, self._call_block)
        self._wrap(self._module, self._call_module)
        if self._has_parallel_mlp:
            for name in PARALLEL_MLP:
                self._wrap(getattr(block, name), self._call_mlp)

    def _wrap(self, module: nn.Module, call: Callable) -> None:
        """Replace the forward of a module by `call`, unless it is replaced already."""
        if module not in self._wrappers:
            self._wrappers[module] = ForwardWrapper(module, call)

    def remove(self) -> None:
        """Restore the forwards of all modules."""
        for wrapper in list(self._wrappers.values()):
            wrapper.remove()

    # Replacements of forwards.

    def _call_block(self, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        if not self._context.is_active():
            return forward(*args, **kwargs)
        call = self.call = EagerCall(self._signature.schedule if self._signature else OverlapSchedule())
        try:
            returned = forward(*args, **kwargs)
        finally:
            self.call = None
            call.drain()
        call.end()
        return returned

    def _call_mlp(self, forward: Callable, given: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute a part of a parallel MLP; where the schedule overlaps it, defer that until the result is used."""
        call = self.call
        if call is None or not self._context.is_active() or not call.schedule.overlaps_mlp:
            return forward(given, *args, **kwargs)
        deferred = Deferred(lambda: forward(materialize(given), *args, **kwargs))
        call.deferred.append(deferred)
        return deferred

    def _call_module(self, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        if not self._context.is_active():
            return forward(*args, **kwargs)
        if self.call is None:  # the block's forward is not called, as that of a ModuleList
            return self._call_block(functools.partial(self._call_module, forward), *args, **kwargs)
        outer, self._context.current = self._context.current, self
        try:
            self._begin_call(args, kwargs)
            returned = forward(*args, **kwargs)
        finally:
            self._context.current = outer
        structure = self.call.structure
        if not structure.verified and not self.call.reached_usp:
            structure.refusal = structure.refusal or NOT_THROUGH_USP
        self.call.drain()
        return returned

    def _begin_call(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Count the call, set its signature, and project V early where its inputs are known."""
        self.count_call()
        given = named_arguments(self._module, args, kwargs)
        tensors = {name: value for name, value in given.items() if torch.is_tensor(value)}
        signature = self._context.signatures.of_call(self._module, tensors, self._context.backend())
        self._set_signature(signature)
        structure = signature.structure
        if structure.source and tensors and not structure.refusal:
            self._begin_projection(structure.source, tensors)

    def _set_signature(self, signature: LayerSignature) -> None:
        """Set the signature of the call, and its schedule where the last call had another signature."""
        call = self.call
        if signature is not self._signature:
            call.schedule = signature.schedule
            signature.has_parallel_mlp = self._has_parallel_mlp
        call.signature = self._signature = signature

    def _begin_projection(self, source: Source, tensors: dict[str, torch.Tensor]) -> None:
        """Project V early, from the arguments of the module or, where Q's input decides which of them, with Q."""
        call = self.call
        call.hidden, call.text = _inputs(source, tensors)
        if call.text is None:  # self-attention
            self._project_early({source.path: call.hidden})
        elif source.text_path:  # joint attention, with a projection for each stream
            self._project_early({source.path: call.hidden, source.text_path: call.text})
        elif source.query_path:  # cross-attention, or joined streams: Q's input decides
            self._wrap(self._module.get_submodule(source.query_path), self._call_query)

    def _call_query(self, forward: Callable, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Project V early, then Q. In cross-attention, Q comes from the hidden states and V from the text; otherwise
        both come from one tensor, in which the module has joined the two streams."""
        call = self.call
        if call and call.text is not None and not call.structure.source.text_path:
            is_cross_attention = given is call.hidden
            self._project_early({call.structure.source.path: call.text if is_cross_attention else given})
        return forward(given, *args, **kwargs)

    # V-First.

    def _is_ready(self, structure: LayerStructure) -> bool:
        """Return whether V of this layer can go first: the structure is ready, and this layer was verified."""
        return structure.ready and self in structure.verified_layers

    def _project_early(self, inputs: dict[str, torch.Tensor]) -> None:
        """Project V now, to send it at once or, in a call that verifies, to compare it later.

        Args:
            inputs: of each projection, by path.
        """
        call, structure = self.call, self.call.structure
        is_ready = self._is_ready(structure)
        if call.early or structure.refusal or (is_ready and not call.schedule.v_first):
            return
        if structure.recipe:
            inputs = {path: inputs[path] for path in structure.recipe.paths}
        modules = {path: self._module.get_submodule(path) for path in inputs}
        if not is_ready and any(map(has_hooks, modules.values())):
            return  # hooks would run twice
        for path, module in modules.items():
            self._wrap(module, functools.partial(self._call_projection, path))
        self._is_projecting_early = True
        try:
            early = {path: EarlyProjection.of(module, inputs[path]) for path, module in modules.items()}
        except (RuntimeError, ValueError, TypeError):
            if is_ready:
                raise
            return  # the table names another input than the module's
        finally:
            self._is_projecting_early = False
        call.early = early
        if is_ready:
            value = structure.recipe.build({path: each.output for path, each in early.items()}, call.num_hidden)
            call.v_handle, call.v_shape = self._context.send_v(value, self), value.shape

    def _call_projection(self, path: str, forward: Callable, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the early projection where it has the same input, else project."""
        early = self.call.early.get(path) if self.call and not self._is_projecting_early else None
        if early is None or early.input is not given or args or kwargs:
            return forward(given, *args, **kwargs)
        # A call that verifies projects again: what reaches USP must not be the tensor that it is compared with.
        requested = early if self._is_ready(self.call.structure) else EarlyProjection.of(forward, given)
        self.call.requested[path] = requested
        return requested.output

    def claim_v_handle(self, value: torch.Tensor) -> Handle | None:
        """Return the handle of V's all-to-all if it has been started, given the V that reached USP; None otherwise.

        The first call of a structure verifies the layer here. All ranks of the group must call this.

        Raises:
            RuntimeError: V has another source than in the verified call. There is no fallback, since only this rank
                knows, and the others wait for the V that it has sent.
        """
        call, structure = self.call, self.call.structure
        call.reached_usp = True
        if not structure.verified or (structure.ready and not self._is_ready(structure)):
            self._verify(value)
        if call.v_handle is None or not call.early:
            return None
        handle, call.early = call.v_handle, {}  # the message holds a copy
        if value.shape != call.v_shape:  # on all ranks, since an all-to-all needs equal shapes
            handle.drain()
            structure.refusal = "V has another shape than before"
            return None
        has_other_source = call.requested.keys() != {*structure.recipe.paths}
        if has_other_source or (structure.in_place and not self._is_in_place(value, structure.recipe)):
            handle.drain()
            raise RuntimeError(
                f"{self.name}: V does not come from {' and '.join(structure.recipe.paths)} as it did before; run with "
                "--cocodiff_v_first off"
            )
        return handle

    def _is_in_place(self, value: torch.Tensor, recipe: Recipe) -> bool:
        """Return whether V that reached USP is a view of its projections, which have not been written since."""
        requested = self.call.requested
        if any(each.is_written for each in requested.values()):
            return False
        outputs = {path: each.output for path, each in requested.items()}
        return recipe.is_in_place(value, outputs, self.call.num_hidden)

    @property
    def has_new_hooks(self) -> bool:
        """Whether a projection of V that was verified without hooks has some now."""
        module, structure = self._module, self._signature.structure if self._signature else None
        if module is None or structure is None or structure.recipe is None or not self._is_ready(structure):
            return False
        return any(has_hooks(module.get_submodule(path)) for path in structure.recipe.paths)

    def _verify(self, value: torch.Tensor) -> None:
        """Compare the early projections with the V that reached USP, and set the structure's recipe or refusal.

        Each rank compares its own tokens only, so all ranks have to agree on the result. A layer is verified once for
        each structure.
        """
        call, structure = self.call, self.call.structure
        recipes, refusal = self._find_recipes(value)
        recipe = recipes[0] if len(recipes) == 1 else None
        in_place = recipe is not None and self._is_in_place(value, recipe)
        if not self._context.all_agree((recipes, in_place)):
            recipe, refusal = None, "the ranks do not agree on where V comes from"
        elif len(recipes) > 1:
            return  # values such as zeros fit several recipes; another call decides
        # A property that one layer lacks does not hold for the structure.
        structure.in_place = in_place and (structure.in_place or not structure.verified)
        structure.verified, structure.recipe, structure.refusal = True, recipe, None if recipe else refusal
        structure.verified_layers.add(self)
        call.drain()
        if structure.refusal:
            self._context.log(f"{structure.name}: {structure.status}")

    def _find_recipes(self, value: torch.Tensor) -> tuple[list[Recipe], str]:
        """Return all recipes that build V from the early projections, and the reason that holds where there is none."""
        call, structure = self.call, self.call.structure
        source = structure.source
        if source is None:
            return [], "its module has no known projection of V"
        paths = [path for path in (source.path, source.text_path) if path]
        hooked = [path for path in paths if has_hooks(self._module.get_submodule(path))]
        if hooked:
            return [], f"{' and '.join(hooked)} has hooks"
        refusal = "V differs from the output of its projections"
        if not call.requested:
            return [], refusal
        outputs = {path: call.early[path].output for path in paths if path in call.requested}
        recipes = find_recipes(value, source.columns, outputs, call.num_hidden)
        return [each for each in recipes if structure.recipe in (None, each)], refusal


def _inputs(source: Source, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the hidden states and the text among the arguments of a module: by name, else the first and the second."""
    _, second, *_ = (*tensors.values(), None)
    return hidden_states(tensors), tensors.get("encoder_hidden_states", second if source.text_path else None)
