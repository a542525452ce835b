"""An attention layer as it is called, and V on its way before a layer's processor asks for Q and K.

A table says which projections V comes from (:mod:`v_source`). The first call of each kind rehearses in each layer: V
is projected ahead, and compared bit for bit with the V that reaches USP. From the second on, where all ranks found it
to be the same, V is projected ahead and sent off, and the finished projection is handed back when the processor asks
for it. A V that is a view of that must still be one when it reaches USP. Any other layer runs as ever.
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
from xfuser_cocodiff.xdit.layers.deferred import PARALLEL_MLP, Deferred, has_hooks, has_parallel_mlp, made
from xfuser_cocodiff.xdit.layers.forward_wrapper import ForwardWrapper
from xfuser_cocodiff.xdit.layers.layer_call import Ahead, Call
from xfuser_cocodiff.xdit.layers.layer_signature import ELSEWHERE, LayerSignature, LayerSignatures
from xfuser_cocodiff.xdit.layers.module_stack import named
from xfuser_cocodiff.xdit.layers.root_module import BaseLayer, RootModule
from xfuser_cocodiff.xdit.layers.v_source import Recipe, find_recipes


@dataclass(eq=False)
class Shared:
    """What the layers of a process have in common."""

    active: Callable[[], bool]
    """Whether exchanges may overlap just now."""
    send: Callable[[torch.Tensor, "Layer"], Handle]
    """Starts the exchange of V, or of its first head group where its call has several; given V and the layer."""
    agreed: Callable[[object], bool]
    """Whether all ranks pass the same; they call it alike."""
    say: Callable[[str], None]
    """Logs a line at INFO."""
    signatures: LayerSignatures = field(init=False, default_factory=LayerSignatures)
    """Kinds of their calls."""
    current: "Layer | None" = field(init=False, default=None)
    """The layer whose module runs."""


class Layer(BaseLayer):
    """An attention module of a transformer, and the block that it stands in."""

    def __init__(self, name: str, module: nn.Module, block: nn.Module, root: RootModule, shared: Shared) -> None:
        super().__init__(name, root)
        # Their forwards hold this layer, not the other way round: a cycle would keep weights.
        self._module_ref, self._block_ref, self._shared = weakref.ref(module), weakref.ref(block), shared
        self.call: Call | None = None
        self._signature: LayerSignature | None = None
        """Of the last call."""
        self._projecting = False
        self._arounds: weakref.WeakKeyDictionary[nn.Module, ForwardWrapper] = weakref.WeakKeyDictionary()
        self._has_parallel_mlp = has_parallel_mlp(block)

    @property
    def _module(self) -> nn.Module:
        return self._module_ref()

    def belongs_to(self, module: nn.Module) -> bool:
        """Whether it is this module's."""
        return self._module_ref() is module

    def install(self) -> None:
        """See the module and its block called from here on; they hold this layer then."""
        block = self._block_ref()
        self._replace(block, self._call_block)
        self._replace(self._module, self._call_module)
        if self._has_parallel_mlp:
            for name in PARALLEL_MLP:
                self._replace(getattr(block, name), self._call_mlp)

    def _replace(self, module: nn.Module, call: Callable) -> None:
        """Call something in the place of a module's forward, once."""
        if module not in self._arounds:
            self._arounds[module] = ForwardWrapper(module, call)

    def remove(self) -> None:
        """Leave the modules as they were."""
        for around in list(self._arounds.values()):
            around.remove()

    # What modules do in a call.

    def _call_block(self, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        if not self._shared.active():
            return forward(*args, **kwargs)
        call = self.call = Call(
            self._signature.candidates.schedule if self._signature and self._signature.candidates else OverlapSchedule()
        )
        try:
            returned = forward(*args, **kwargs)
        finally:
            self.call = None
            call.drain()
        call.ended()
        return returned

    def _call_mlp(self, forward: Callable, given: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute a part of a parallel MLP, or put it off until its result is used, where the schedule has it so."""
        call = self.call
        if call is None or not self._shared.active() or not call.schedule.overlaps_mlp:
            return forward(given, *args, **kwargs)
        later = Deferred(lambda: forward(made(given), *args, **kwargs))
        call.deferred.append(later)
        return later

    def _call_module(self, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        if not self._shared.active():
            return forward(*args, **kwargs)
        if self.call is None:  # what holds the module is not called as one, such as a list
            return self._call_block(functools.partial(self._call_module, forward), *args, **kwargs)
        around, self._shared.current = self._shared.current, self
        try:
            self._begins(args, kwargs)
            returned = forward(*args, **kwargs)
        finally:
            self._shared.current = around
        signature = self.call.signature
        if not signature.rehearsed and not self.call.is_attended:
            signature.refusal = signature.refusal or ELSEWHERE
        self.call.drain()
        return returned

    def _begins(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Find the kind of the call, and project V as soon as its input is known."""
        self.count_call()
        call, given = self.call, named(self._module, args, kwargs)
        tensors = {name: value for name, value in given.items() if torch.is_tensor(value)}
        signature = self._shared.signatures.of(self._module, tensors)
        if signature is not self._signature:
            call.schedule = signature.candidates.schedule if signature.candidates else OverlapSchedule()
            signature.has_parallel_mlp = self._has_parallel_mlp
        call.signature = self._signature = signature
        source, (first, second, *_) = signature.source, (*tensors.values(), None, None)
        if source is None or first is None or signature.refusal:
            return
        call.hidden = tensors.get("hidden_states", first)
        call.text = tensors.get("encoder_hidden_states", second if source.of_text else None)
        if call.text is None:
            self._project({source.own: call.hidden})
        elif source.of_text:
            self._project({source.own: call.hidden, source.of_text: call.text})
        elif source.query:
            self._replace(self._module.get_submodule(source.query), self._call_query)

    def _call_query(self, forward: Callable, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Project Q, behind a V of both streams, made one in the module, or of the text that Q attends to."""
        call = self.call
        if call and call.text is not None and not call.signature.source.of_text:
            self._project({call.signature.source.own: call.text if given is call.hidden else given})
        return forward(given, *args, **kwargs)

    # V ahead of time.

    def _is_ready(self, signature: LayerSignature) -> bool:
        """Whether V of this layer can go first."""
        return signature.ready and self in signature.rehearsed_by

    def _project(self, given: dict[str, torch.Tensor]) -> None:
        """Make V now if it is to be made ahead, and send it off unless this is a rehearsal."""
        call, signature = self.call, self.call.signature
        is_ready = self._is_ready(signature)
        if call.ahead or signature.refusal or (is_ready and not call.schedule.v_first):
            return
        if signature.recipe:
            given = {path: given[path] for path in signature.recipe.paths}
        modules = {path: self._module.get_submodule(path) for path in given}
        if not is_ready and any(map(has_hooks, modules.values())):
            return  # who listens would hear of it twice
        for path, module in modules.items():
            self._replace(module, functools.partial(self._call_projection, path))
        self._projecting = True
        try:
            ahead = {path: Ahead.of(module, given[path]) for path, module in modules.items()}
        except (RuntimeError, ValueError, TypeError):
            if is_ready:
                raise
            return  # it is not what the table says that it is projected from
        finally:
            self._projecting = False
        call.ahead = ahead
        if is_ready:
            value = signature.recipe.build({path: each.returned for path, each in ahead.items()})
            call.handle = self._shared.send(value, self)

    def _call_projection(self, path: str, forward: Callable, given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what was made ahead, if that is what a projection of V is asked for."""
        ahead = self.call.ahead.get(path) if self.call and not self._projecting else None
        if ahead is None or ahead.given is not given or args or kwargs:
            return forward(given, *args, **kwargs)
        # In a rehearsal, what USP gets must not be what it is compared with.
        asked = self.call.asked[path] = ahead if self._is_ready(self.call.signature) else Ahead.of(forward, given)
        return asked.returned

    def value_under_way(self, value: torch.Tensor) -> Handle | None:
        """Given the V that reached USP, its exchange if that is under way.

        Every rank of the group must call this.

        Raises:
            RuntimeError: the processor has made V in another way than before. That is known on this rank only, while
                others count on the V that it has sent.
        """
        call, signature = self.call, self.call.signature
        call.is_attended = True
        if not signature.rehearsed or (signature.ready and not self._is_ready(signature)):
            self._rehearse(value)
        if call.handle is None or not call.ahead:
            return None
        handle, call.ahead = call.handle, {}  # the exchange has a copy
        if value.shape != signature.recipe.shape:  # on every rank, or no exchange could be
            handle.drain()
            signature.refusal = "V has another shape than before"
            return None
        if call.asked.keys() != {*signature.recipe.paths} or (
            signature.keeps_place and not self._keeps_place(value, signature.recipe)
        ):
            handle.drain()
            raise RuntimeError(
                f"{self.name}: V does not come from {' and '.join(signature.recipe.paths)} as it did before; run with "
                "--cocodiff_v_first off"
            )
        return handle

    def _keeps_place(self, value: torch.Tensor, recipe: Recipe) -> bool:
        """Whether V that reached USP lies where its projection has put it, and was not written since."""
        asked = self.call.asked
        if any(each.is_written for each in asked.values()):
            return False
        return recipe.is_in_place(value, {path: each.returned for path, each in asked.items()})

    @property
    def has_new_hooks(self) -> bool:
        """Whether somebody has put hooks on a projection of its V that was rehearsed without them."""
        signature, module = self._signature, self._module
        if module is None or signature is None or signature.recipe is None or not self._is_ready(signature):
            return False
        return any(has_hooks(module.get_submodule(path)) for path in signature.recipe.paths)

    def _rehearse(self, value: torch.Tensor) -> None:
        """Compare V projected ahead with V; each rank sees its own values only, so that all agree on what they found.
        A layer does this once for a kind."""
        call, signature = self.call, self.call.signature
        recipes: list[Recipe] = []
        refusal = "V is not what its projections were expected to make"
        paths = [path for path in (signature.source.own, signature.source.of_text) if path] if signature.source else []
        hooked = [path for path in paths if has_hooks(self._module.get_submodule(path))]
        if not paths:
            refusal = "its module has no projection of V that is known"
        elif hooked:
            refusal = f"{' and '.join(hooked)} has hooks of others"
        elif call.asked:
            recipes = find_recipes(
                value,
                signature.source.columns,
                {path: call.ahead[path].returned for path in paths if path in call.asked},
            )
            recipes = [each for each in recipes if signature.recipe in (None, each)]
        recipe = recipes[0] if len(recipes) == 1 else None
        keeps_place = recipe is not None and self._keeps_place(value, recipe)
        if not self._shared.agreed((recipes, keeps_place)):
            recipe, refusal = None, "the ranks do not agree on where V comes from"
        elif len(recipes) > 1:
            return  # which of them it is, another call tells
        # What holds in one layer only holds in none.
        signature.keeps_place = keeps_place and (signature.keeps_place or not signature.rehearsed)
        signature.rehearsed, signature.recipe, signature.refusal = True, recipe, None if recipe else refusal
        signature.rehearsed_by.add(self)
        call.drain()
        if signature.refusal:
            self._shared.say(f"{signature.name}: {signature.status}")
