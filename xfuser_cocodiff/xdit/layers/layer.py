"""Attention layers in eager mode, and V-First: V is projected and sent before the processor asks for Q and K.

A table lists the projections that V comes from (:mod:`model_projections`). The first call of a layer shows, when V
reaches USP, how it was built from them, and from which arguments of the module. Later calls project V early and start
its all-to-all, and the processor gets the finished projection when it asks for it. USP then checks that V was built in
the same way.

No values are compared, and ranks need not agree: all of this follows from the model's code, and from shapes, which are
equal on all ranks. Hooks of a projection, which may differ, are a part of its call. Only a rank that runs other code
than the others would differ, and then raises an error.
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from xfuser_cocodiff.engine.comm.comm_stream import Handle
from xfuser_cocodiff.xdit.layers.call_wrapper import CallWrapper, is_wrapped
from xfuser_cocodiff.xdit.layers.deferred import PARALLEL_MLP, Deferred, has_parallel_mlp, is_prefetched, materialize
from xfuser_cocodiff.xdit.layers.layer_call import QUERY_INPUT, EagerCall
from xfuser_cocodiff.xdit.layers.layer_signature import LayerSignature, LayerSignatures, LayerStructure
from xfuser_cocodiff.xdit.layers.model_projections import Recipe, find_recipe, find_source, projections_of
from xfuser_cocodiff.xdit.layers.module_stack import named_arguments
from xfuser_cocodiff.xdit.layers.root_module import BaseLayer, LayerSession, RootModule
from xfuser_cocodiff.xdit.patching import host
from xfuser_cocodiff.xdit.patching.log import info_once


@dataclass(eq=False)
class LayerContext:
    """What all layers of a session share."""

    session: LayerSession
    """The session of the layers."""
    may_overlap: bool
    """Whether V may go first and an MLP may be deferred; if not, no attention module is wrapped."""
    signatures: LayerSignatures = field(init=False)
    """Signatures of calls so far."""
    _wrappers: weakref.WeakSet[CallWrapper] = field(init=False, default_factory=weakref.WeakSet)
    """Wrappers of modules, which hold them."""

    def __post_init__(self) -> None:
        self.signatures = LayerSignatures(self.may_overlap)

    def wrap(self, module: nn.Module | None, call: Callable) -> None:
        """Have this called instead of a module, if there is one, with the module's call and its arguments."""
        if module is not None:
            self._wrappers.add(CallWrapper(module, call))

    def unwrap(self) -> None:
        """Restore the calls of all modules."""
        for wrapper in list(self._wrappers):
            wrapper.remove()


class Layer(BaseLayer):
    """An attention module of a transformer, whose calls it wraps where they may overlap with communication.

    Args:
        name: path of the module in the transformer.
        module: the attention module.
        root: the transformer.
        context: shared with all other layers.
    """

    def __init__(self, name: str, module: nn.Module, root: RootModule, context: LayerContext) -> None:
        super().__init__(name, root)
        # Wrapped modules hold this layer, not the other way round: a cycle would keep weights alive.
        self._module_ref, self._context = weakref.ref(module), context
        self.call: EagerCall | None = None
        self._signature: LayerSignature | None = None
        """Signature of the last call."""
        self._recipes: dict[LayerStructure, Recipe] = {}
        """How V is built, by structure of the calls that have shown it."""
        self._deferred: weakref.WeakSet[Deferred] = weakref.WeakSet()
        """Parts of the block's MLP that were called, and not computed yet."""
        block = root.transformer.get_submodule(name.rpartition(".")[0])
        self._has_parallel_mlp = has_parallel_mlp(block)
        if context.may_overlap:
            self._wrap_calls(module, block)

    @property
    def module(self) -> nn.Module:
        """The module, which runs or is held by its transformer."""
        return self._module_ref()

    def _wrap_calls(self, module: nn.Module, block: nn.Module) -> None:
        if source := find_source(module):
            self._context.wrap(module, self._call_module)
            projections = projections_of(module)
            for path in (source.path, source.text_path):
                self._context.wrap(projections.get(path), functools.partial(self._call_projection, path))
            self._context.wrap(projections.get(source.query_path), self._call_query)
        for name in PARALLEL_MLP if self._has_parallel_mlp else ():
            self._context.wrap(getattr(block, name), self._call_mlp)

    # Replacements of calls.

    def _call_module(self, original: Callable, *args: Any, **kwargs: Any) -> Any:
        if not self._context.session.overlaps():
            return original(*args, **kwargs)
        with self.new_call(args, kwargs):
            self._project_early()
            return original(*args, **kwargs)

    def _call_query(self, original: Callable, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Project Q; before it V, where both have the same input, such as two streams that the processor has joined."""
        if self.call:
            self.call.arguments[QUERY_INPUT] = given
            self._project_early()
        return original(given, *args, **kwargs)

    def _call_projection(self, path: str, original: Callable, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the early projection where it has the same input, else project."""
        call = self.call
        is_recorded = call and (call.recipe or not call.signature.structure.refusal)
        if not is_recorded or args or kwargs:
            return original(given, *args, **kwargs)
        return call.request(path, original, given)

    def _call_mlp(self, original: Callable, given: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute a part of a parallel MLP; where the schedule overlaps it, defer that until the result is used."""
        is_overlapped = self._signature is not None and self._signature.schedule.overlaps_mlp
        if not is_overlapped or not self._context.session.overlaps():
            return original(given, *args, **kwargs)
        deferred = Deferred(lambda: original(materialize(given), *args, **kwargs))
        self._deferred.add(deferred)
        return deferred

    def take_deferred(self) -> list[Deferred]:
        """Return the parts of the MLP that may be computed while Q, K and V are in flight."""
        deferred = list(self._deferred)
        self._deferred.clear()
        return deferred

    @contextmanager
    def new_call(self, args: tuple, kwargs: dict[str, Any]) -> Iterator[None]:
        """Have a call of the module with these arguments as :attr:`call`; however it ends, nothing stays in flight."""
        self.count_call()
        given = named_arguments(self.module, args, kwargs)
        tensors = {name: value for name, value in given.items() if torch.is_tensor(value)}
        self._signature = signature = self._context.signatures.of_call(self.module, tensors, host.backend_name())
        signature.has_parallel_mlp = self._has_parallel_mlp
        schedule = signature.schedule
        recipe = self._recipes.get(signature.structure) if schedule.v_first else None
        self.call = call = EagerCall(schedule, signature, arguments=tensors, recipe=recipe)
        try:
            yield
        finally:
            self.call = None
            call.drain()
        call.end()

    # V-First.

    def _project_early(self) -> None:
        """Project V and start its all-to-all, once all inputs of its projections are known."""
        call = self.call
        if call.recipe is None or call.early or call.requested:
            return
        arguments, projections = call.recipe.arguments, projections_of(self.module)
        if not call.arguments.keys() >= {*arguments.values()}:
            return
        # A LoRA replaces projections, and is loaded on all ranks.
        if not all(is_wrapped(projections[path]) and not is_prefetched(projections[path]) for path in arguments):
            return
        for path, name in arguments.items():
            projections[path](call.arguments[name])
        call.early, call.requested = call.requested, {}
        value = call.recipe.build(call.early, call.num_hidden)
        call.v_handle, call.v_kind = self._context.session.start_value(value, self), (value.shape, value.dtype)

    def claim_v_handle(self, value: torch.Tensor) -> Handle | None:
        """Return the handle of V's all-to-all if it has been started, given the V that reached USP; None otherwise.

        Raises:
            RuntimeError: V has another source than in the first call. There is no fallback, since only this rank may
                know, and the others wait for the V that it has sent.
        """
        call, structure = self.call, self.call.signature.structure
        structure.reaches_usp = True
        if not (structure in self._recipes or structure.refusal):
            self._observe(value)
        early, call.early = call.early, {}  # the message holds a copy
        if not early:
            return None
        if (value.shape, value.dtype) != call.v_kind:  # on all ranks, since an all-to-all needs equal shapes
            call.v_handle.drain()
            del self._recipes[structure]  # the next call shows it again
            return None
        recipe = call.recipe
        is_intact = all(call.requested.get(path) is each and not each.is_written for path, each in early.items())
        if not is_intact or (recipe.is_view and not recipe.fits(value, early, call.num_hidden)):
            raise RuntimeError(
                f"{self.name}: V does not come from {' and '.join(recipe.paths)} as it did before; run with "
                "--cocodiff_v_first off"
            )
        return call.v_handle

    def _observe(self, value: torch.Tensor) -> None:
        """Set how V is built, or the reason why it does not go first."""
        call, structure = self.call, self.call.signature.structure
        processor = getattr(self.module, "processor", None)
        recipe = find_recipe(value, structure.source, processor, call.requested, call.num_hidden)
        if recipe:
            self._recipes[structure] = structure.recipe = recipe
            return
        structure.refusal = f"it is not known how V is built from {structure.source.path} here"
        if not structure.ready:
            info_once(f"{structure.name}: {structure.status}")
