"""An attention layer as it is called, and V on its way before a layer's processor asks for Q and K.

Nothing here knows a model. The first call of a kind of layer is watched: what its parts were given and returned,
compared with the V that reached USP, tells how V is made. The second call rehearses: V is projected ahead, and compared
with the V that came about as ever. From the third on, V is projected ahead and sent off, and the finished projection is
handed back when the processor asks for it. A layer that is not understood runs as ever.
"""

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from xfuser_cocodiff.attention.schedule import Schedule
from xfuser_cocodiff.exchange.lane import Handle
from xfuser_cocodiff.xdit.layers.around import Around
from xfuser_cocodiff.xdit.layers.call import Call, Watch
from xfuser_cocodiff.xdit.layers.kind import ELSEWHERE, Kind, Kinds, Trigger
from xfuser_cocodiff.xdit.layers.later import PARALLEL_MLP, Later, has_parallel_mlp, made
from xfuser_cocodiff.xdit.layers.learning import learn, rehearse
from xfuser_cocodiff.xdit.layers.place import Place
from xfuser_cocodiff.xdit.layers.root import Root
from xfuser_cocodiff.xdit.layers.v_source import Called


@dataclass
class Shared:
    """What the layers of a process have in common."""

    active: Callable[[], bool]
    """Whether exchanges may overlap just now."""
    send: Callable[[torch.Tensor, "Layer"], Handle]
    """Starts the exchange of V, or of its first head group where its call has several; given V and the layer."""
    agreed: Callable[[object], bool]
    """Whether all ranks pass the same; they call it alike."""
    kinds: Kinds = field(default_factory=Kinds)
    current: "Layer | None" = None
    """The one whose module runs."""


class Layer(Place):
    """An attention module of a transformer, and the block that it stands in."""

    def __init__(self, name: str, module: nn.Module, block: nn.Module, root: Root, shared: Shared) -> None:
        super().__init__(name, root)
        # Their forwards hold this layer, not the other way round: a cycle would keep weights.
        self._module_ref, self._block_ref, self._shared = weakref.ref(module), weakref.ref(block), shared
        self.call: Call | None = None
        self._kind: Kind | None = None
        """Of the last call."""
        self._projecting = False
        self._hooks: list[Any] = []
        self._watch = Watch()
        self._around_forward: weakref.WeakKeyDictionary[nn.Module, Around] = weakref.WeakKeyDictionary()
        self.has_parallel_mlp = has_parallel_mlp(block)
        """Whether there is something to compute while Q, K and V travel."""
        self._triggers: set[Trigger] = set()

    @property
    def _module(self) -> nn.Module:
        return self._module_ref()

    @property
    def _block(self) -> nn.Module:
        return self._block_ref()

    def follow(self) -> None:
        """See the module and its block called from here on; they hold this layer then."""
        self._replace(self._block, self._call_block)
        self._replace(self._module, self._call_module)
        if self.has_parallel_mlp:
            for name in PARALLEL_MLP:
                self._replace(self._block.get_submodule(name), self._put_off)

    def _replace(self, module: nn.Module, call: Callable) -> None:
        """Call something in the place of a module's forward, once."""
        if module not in self._around_forward:
            self._around_forward[module] = Around(module, call)

    def remove(self) -> None:
        """Leave the modules as they were."""
        self._watch.stop()
        for hook in self._hooks:
            hook.remove()
        for around in list(self._around_forward.values()):
            around.remove()

    # A call.

    def _call_block(self, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        if not self._shared.active():
            return forward(*args, **kwargs)
        self._block_begins()
        try:
            returned = forward(*args, **kwargs)
            self._block_ends()
        finally:
            self._drop()
        return returned

    def _call_module(self, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        if not self._shared.active():
            return forward(*args, **kwargs)
        if self.call is None:  # what holds the module is not called as one, such as a list
            return self._call_block(functools.partial(self._call_module, forward), *args, **kwargs)
        around, self._shared.current = self._shared.current, self
        try:
            self._begins(args, kwargs)
            returned = forward(*args, **kwargs)
            if self.call.kind.unknown:
                self.call.kind.refusal = ELSEWHERE
        finally:
            self._shared.current = around
            self._watch.stop()
            self.call.abandon()
        return returned

    def _drop(self) -> None:
        call, self.call = self.call, None
        self._watch.stop()
        if call:
            call.abandon()

    def _block_begins(self) -> None:
        self.call = Call(self._kind.trial.schedule if self._kind and self._kind.trial else Schedule())
        if self._kind is None or self._kind.unknown:
            self._watch.block(self._block, self._module, self.call)

    def _begins(self, args: tuple, kwargs: dict[str, Any]) -> None:
        self._watch.stop()
        self.meet()
        call, given = self.call, dict[Any, Any]([*enumerate(args), *kwargs.items()])
        call.arguments = {key: value for key, value in given.items() if torch.is_tensor(value)}
        call.kind = self._shared.kinds.of(self._module, call.arguments)
        if call.kind is not self._kind:
            call.abandon()
            call.schedule = call.kind.trial.schedule if call.kind.trial else Schedule()
            self._kind = call.kind
            call.kind.has_parallel_mlp = self.has_parallel_mlp
        if call.kind.refusal is None:
            if call.kind.recipe is None:
                self._watch.submodules(self._module, call)
            else:
                self._listen(call.kind)
                if call.kind.arguments and self._goes_first(call):
                    self._project({path: call.arguments[key] for path, key in call.kind.arguments.items()})

    def _block_ends(self) -> None:
        call = self.call
        # A refresh says nothing of steps that are encoded by what was sent before.
        is_refresh = call.layer_codecs is not None and call.layer_codecs.owes_nothing
        if call.kind and call.kind.trial:
            call.kind.trial.ran(is_usual=not is_refresh)

    def _goes_first(self, call: Call) -> bool:
        """Whether V is to be projected ahead now, to be sent or to rehearse."""
        kind = call.kind
        return not call.ahead and kind.refusal is None and (not kind.rehearsed or call.schedule.v_first)

    # V ahead of time.

    def _listen(self, kind: Kind) -> None:
        """Have V's projections ask for what was made ahead, and the part that comes first say so."""
        for path in kind.recipe.paths:
            self._replace(self._module.get_submodule(path), functools.partial(self._ask, path))
        if kind.trigger and kind.trigger not in self._triggers:
            inside, path = kind.trigger
            submodule = (self._module if inside else self._block).get_submodule(path)
            self._hooks.append(submodule.register_forward_pre_hook(self._triggered))
            self._triggers.add(kind.trigger)

    def _ask(self, path: str, forward: Callable, given: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return what a projection has made ahead, if that is what it is asked for."""
        ahead = self.call.ahead.get(path) if self.call and not self._projecting else None
        if ahead is None or ahead.given is not given or args or kwargs:
            return forward(given, *args, **kwargs)
        self.call.asked.add(path)
        # In a rehearsal, what USP gets must not be what it is compared with.
        return ahead.returned if self.call.kind.rehearsed else forward(given)

    def _put_off(self, forward: Callable, given: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute a part of an MLP when it has to be, where the schedule has it so."""
        if self.call is None or not self.call.schedule.beside or not self._shared.active():
            return forward(given, *args, **kwargs)
        later = Later(lambda: forward(made(given), *args, **kwargs))
        self.call.later.append(later)
        return later

    def _triggered(self, _: nn.Module, args: tuple) -> None:
        call, kind = self.call, self._kind
        if call is None or self._projecting or kind is None or kind.trigger is None or not torch.is_tensor(args[0]):
            return
        if tuple(args[0].shape) != kind.given:  # a call of another kind, which is known when the module is called
            return
        call.kind = kind  # as far as can be known before that
        if self._goes_first(call):
            [path] = kind.recipe.paths
            self._project({path: args[0]})

    def _project(self, given: dict[str, torch.Tensor]) -> None:
        """Make V now, and send it off unless this is a rehearsal."""
        call, self._projecting = self.call, True
        try:
            for path, tensor in given.items():
                call.ahead[path] = Called(path, tensor, self._module.get_submodule(path)(tensor))
        finally:
            self._projecting = False
        if call.kind.ready:
            call.handle = self._shared.send(call.value_ahead(), self)

    def value_under_way(self, value: torch.Tensor) -> Handle | None:
        """Given the V that reached USP, its exchange if that is under way. Learns from this V while there is to learn.

        Every rank of the group must call this.
        """
        call, kind = self.call, self.call.kind
        if kind.refusal is None and not kind.rehearsed:
            if kind.recipe:
                rehearse(kind, call, value, self._shared.agreed)
            else:
                self._watch.stop()
                learn(kind, call, self._module, value, self._shared.agreed)
        if call.handle is None:
            return None
        handle, call.handle = call.handle, None
        call.ahead = {}  # the exchange has a copy
        if call.asked == kind.recipe.paths and value.shape == kind.recipe.shape:
            return handle
        handle.abandon()
        kind.refusal = "V did not come about as it had before"
        return None
