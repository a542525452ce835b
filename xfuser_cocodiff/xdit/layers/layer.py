"""Attention layers in eager mode, and V-First: V is projected and sent before the processor asks for Q and K.

A table lists the projections that V comes from (:mod:`v_source`). The first call of a layer shows, when V reaches USP,
how it was built from them, and from which arguments of the module. Later calls project V early and start its
all-to-all, and the processor gets the finished projection when it asks for it. USP then checks that V was built in the
same way.

No values are compared, and ranks need not agree: all of this follows from the model's code, and from shapes, which are
equal on all ranks. Hooks of a projection, which may differ, are a part of its call. Only a rank that runs other code
than the others would differ, and then raises an error.
"""

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from xfuser_cocodiff.engine.comm.comm_stream import Handle
from xfuser_cocodiff.xdit.layers.call_wrapper import CallWrapper
from xfuser_cocodiff.xdit.layers.deferred import PARALLEL_MLP, Deferred, has_parallel_mlp, materialize
from xfuser_cocodiff.xdit.layers.layer_call import EagerCall, Projection
from xfuser_cocodiff.xdit.layers.layer_signature import LayerSignature, LayerSignatures, LayerStructure
from xfuser_cocodiff.xdit.layers.module_stack import named_arguments
from xfuser_cocodiff.xdit.layers.root_module import BaseLayer, RootModule
from xfuser_cocodiff.xdit.layers.v_source import Recipe, find_copied, find_recipe, find_source
from xfuser_cocodiff.xdit.patching import host
from xfuser_cocodiff.xdit.patching.log import info_once


@dataclass(eq=False)
class LayerContext:
    """State and callbacks that all layers of a session share."""

    is_active: Callable[[], bool]
    """Returns whether communication may overlap with computation at the moment."""
    send_v: Callable[[torch.Tensor, "Layer"], Handle]
    """Starts the all-to-all of a layer's V, or of its first head group where the call has several."""
    may_overlap: bool
    """Whether V may go first and an MLP may be deferred; if not, no module is wrapped."""
    signatures: LayerSignatures = field(init=False)
    """Signatures of calls so far."""
    current: "Layer | None" = field(init=False, default=None)
    """The layer whose attention runs."""

    def __post_init__(self) -> None:
        self.signatures = LayerSignatures(self.may_overlap)


class VSource(NamedTuple):
    """Where a layer's V comes from."""

    recipe: Recipe
    inputs: Mapping[str, str]
    """Argument of the module that each projection has as input, by path; empty where it is the input of Q, which the
    processor has made."""


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
        # Wrappers of their calls hold this layer, not the other way round: a cycle would keep weights alive.
        self._module_ref, self._block_ref, self._context = weakref.ref(module), weakref.ref(block), context
        self.call: EagerCall | None = None
        self._signature: LayerSignature | None = None
        """Signature of the last call."""
        self._v_sources: dict[LayerStructure, VSource] = {}
        """Where V comes from, by structure of the calls that have shown it."""
        self._wrappers: weakref.WeakValueDictionary[str, CallWrapper] = weakref.WeakValueDictionary()
        """Wrappers of modules, which hold them; those of projections by path."""
        self._deferred: weakref.WeakSet[Deferred] = weakref.WeakSet()
        """Parts of the block's MLP that were called, and not computed yet."""
        self._has_parallel_mlp = has_parallel_mlp(block)

    @property
    def module(self) -> nn.Module:
        """The module, which runs or is held by its transformer."""
        return self._module_ref()

    def install(self) -> None:
        """Wrap the calls of the modules that may overlap with communication, which hold this layer from then on."""
        source = find_source(self.module)
        if source is None and not self._has_parallel_mlp:
            return
        self._wrap("", self.module, self._call_module)
        for path in (source.path, source.text_path, source.query_path) if source else ():
            if path:
                call = self._call_query if path == source.query_path else functools.partial(self._call_projection, path)
                self._wrap(path, self.module.get_submodule(path), call)
        for name in PARALLEL_MLP if self._has_parallel_mlp else ():
            self._wrap(f"block.{name}", getattr(self._block_ref(), name), self._call_mlp)

    def _wrap(self, name: str, module: nn.Module, call: Callable) -> None:
        self._wrappers[name] = CallWrapper(module, call)

    def remove(self) -> None:
        """Restore the calls of all modules."""
        for wrapper in list(self._wrappers.values()):
            wrapper.remove()

    # Replacements of calls.

    def _call_mlp(self, original: Callable, given: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute a part of a parallel MLP; where the schedule overlaps it, defer that until the result is used."""
        is_overlapped = self._signature is not None and self._signature.schedule.overlaps_mlp
        if not is_overlapped or not self._context.is_active():
            return original(given, *args, **kwargs)
        deferred = Deferred(lambda: original(materialize(given), *args, **kwargs))
        self._deferred.add(deferred)
        return deferred

    def take_deferred(self) -> list[Deferred]:
        """Return the parts of the MLP that may be computed while Q, K and V are in flight."""
        deferred = list(self._deferred)
        self._deferred.clear()
        return deferred

    def _call_module(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        if not self._context.is_active():
            return original(*args, **kwargs)
        call = self.begin_call(args, kwargs)
        outer, self._context.current = self._context.current, self
        try:
            source = self._v_source
            if source and source.inputs:
                self._project_early({path: call.arguments[name] for path, name in source.inputs.items()})
            returned = original(*args, **kwargs)
        finally:
            self._context.current, self.call = outer, None
            call.drain()
        call.end()
        return returned

    def begin_call(self, args: tuple, kwargs: dict[str, Any]) -> EagerCall:
        """Begin a call of the module with these arguments."""
        self.count_call()
        module = self.module
        given = named_arguments(module, args, kwargs)
        tensors = {name: value for name, value in given.items() if torch.is_tensor(value)}
        self._signature = signature = self._context.signatures.of_call(module, tensors, host.backend_name())
        signature.has_parallel_mlp = self._has_parallel_mlp
        observes = not (signature.structure.refusal or signature.structure in self._v_sources)
        self.call = EagerCall(signature.schedule, signature, arguments=tensors, observes=observes)
        return self.call

    def _call_query(self, original: Callable, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Project Q; before it V, where both have the same input, such as two streams that the processor has joined."""
        if self.call:
            self.call.query_input = given
            source = self._v_source
            if source and not source.inputs:
                self._project_early({path: given for path in source.recipe.paths})
        return original(given, *args, **kwargs)

    def _call_projection(self, path: str, original: Callable, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the early projection where it has the same input, else project."""
        call = self.call
        early = call.early.get(path) if call else None
        if args or kwargs or not (early or (call and call.observes)):
            return original(given, *args, **kwargs)
        call.requested[path] = early if early and early.input is given else Projection.of(original, given)
        return call.requested[path].output

    # V-First.

    @property
    def _v_source(self) -> VSource | None:
        """Where V comes from in the current call; None where it is not sent early."""
        call = self.call
        return self._v_sources.get(call.structure) if call.schedule.v_first else None

    def _project_early(self, inputs: dict[str, torch.Tensor]) -> None:
        """Project V now, and start its all-to-all.

        Args:
            inputs: of each projection, by path.
        """
        call = self.call
        # Offloading that prefetches weights needs the order of the first call; pipelines set it on all ranks.
        if call.early or any("_diffusers_hook" in vars(self.module.get_submodule(path)) for path in inputs):
            return
        call.early = {path: Projection.of(self._wrappers[path].original, given) for path, given in inputs.items()}
        outputs = {path: each.output for path, each in call.early.items()}
        value = self._v_sources[call.structure].recipe.build(outputs, call.num_hidden)
        call.v_handle, call.v_kind = self._context.send_v(value, self), (value.shape, value.dtype)

    def claim_v_handle(self, value: torch.Tensor) -> Handle | None:
        """Return the handle of V's all-to-all if it has been started, given the V that reached USP; None otherwise.

        Raises:
            RuntimeError: V has another source than in the first call. There is no fallback, since only this rank may
                know, and the others wait for the V that it has sent.
        """
        call = self.call
        call.structure.reaches_usp = True
        if call.observes:
            self._observe(value)
        if not call.early:
            return None
        early, recipe = call.early, self._v_sources[call.structure].recipe
        call.early = {}  # the message holds a copy
        if (value.shape, value.dtype) != call.v_kind:  # on all ranks, since an all-to-all needs equal shapes
            call.v_handle.drain()
            del self._v_sources[call.structure]  # the next call shows it again
            return None
        is_intact = all(call.requested.get(path) is each and not each.is_written for path, each in early.items())
        if not is_intact or (recipe.is_view and not recipe.fits(value, call.outputs, call.num_hidden)):
            call.v_handle.drain()
            raise RuntimeError(
                f"{self.name}: V does not come from {' and '.join(recipe.paths)} as it did before; run with "
                "--cocodiff_v_first off"
            )
        return call.v_handle

    def _observe(self, value: torch.Tensor) -> None:
        """Set where V comes from, or the reason why it does not go first."""
        call, structure = self.call, self.call.structure
        call.observes = False
        source, requested = structure.source, call.requested
        found: Recipe | None = None
        if source.path in requested and not any(each.is_written for each in requested.values()):
            # With PipeFusion, processors join V with that of other patches, which they keep from earlier steps.
            copied = None if host.has_patches() else find_copied(getattr(self.module, "processor", None))
            found = find_recipe(value, source, copied, call.outputs, call.num_hidden)
        if found is None:
            self._refuse(f"it is not known how V is built from {source.path} here")
            return
        names = {id(tensor): name for name, tensor in reversed(call.arguments.items())}
        inputs = {path: names.get(id(requested[path].input), "") for path in found.paths}
        if not all(inputs.values()):
            if any(requested[path].input is not call.query_input for path in found.paths):
                self._refuse(f"the input of {' or '.join(found.paths)} is no argument of the module")
                return
            inputs = {}
        self._v_sources[structure] = VSource(found, inputs)
        structure.recipe = found

    def _refuse(self, reason: str) -> None:
        structure = self.call.structure
        structure.refusal = reason
        if not structure.ready:
            info_once(f"{structure.name}: {structure.status}")
