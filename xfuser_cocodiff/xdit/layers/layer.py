"""An attention layer as it is called, and V on its way before a layer's processor asks for Q and K.

Nothing here knows a model. The first call of a kind of layer is watched: what its parts were given and returned,
compared with the V that reached USP, tells how V is made. The second call rehearses: V is projected ahead, and compared
with the V that came about as ever. From the third on, V is projected ahead and sent off, and the finished projection is
handed back when the processor asks for it. A layer that is not understood runs as ever.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from xfuser_cocodiff.attention.schedule import Schedule
from xfuser_cocodiff.exchange.lane import Handle
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
        self._module, self._block, self._shared = module, block, shared
        self.call: Call | None = None
        self._kind: Kind | None = None
        """Of the last call."""
        self._around: Layer | None = None
        self._projecting = False
        self._is_alone = False
        """Whether the call under way began with the module: what holds it is not called as a module, as a list."""
        self._hooks: list[Any] = []
        self._watch = Watch()
        self._replaced: dict[nn.Module, tuple[Callable, Callable | None]] = {}
        """What stands in the place of the forward of submodules, and what stood there."""
        self.has_parallel_mlp = has_parallel_mlp(block)
        """Whether there is something to compute while Q, K and V travel."""
        self._triggers: set[Trigger] = set()

    def follow(self) -> None:
        """See the module and its block called from here on; they hold this layer then."""
        self._hooks = [
            self._block.register_forward_pre_hook(self._block_begins),
            self._module.register_forward_pre_hook(self._begins, with_kwargs=True),
            self._module.register_forward_hook(self._ends, always_call=True),
            self._block.register_forward_hook(self._block_ends, always_call=True),
        ]
        if self.has_parallel_mlp:
            for name in PARALLEL_MLP:
                self._replace(self._block.get_submodule(name), self._putting_off)

    def remove(self) -> None:
        """Leave the modules as they were."""
        self._watch.stop()
        for hook in self._hooks:
            hook.remove()
        for submodule, (own, before) in self._replaced.items():
            if vars(submodule).get("forward") is not own:  # others have put theirs around it, and do as it does
                continue
            del submodule.forward
            if before:
                submodule.forward = before

    # A call.

    def _block_begins(self, *_: Any) -> None:
        if not self._shared.active():
            return
        if self.call:  # of a block that never ended
            self.call.abandon()
        self.call = Call(self._kind.trial.schedule if self._kind and self._kind.trial else Schedule())
        if self._kind is None or self._kind.unknown:
            self._watch.block(self._block, self._module, self.call)

    def _begins(self, _: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not self._shared.active():
            return
        if self.call is None:
            self._block_begins()
            self._is_alone = True
        self._watch.stop()
        self.meet()
        call, self._around, self._shared.current = self.call, self._shared.current, self
        given: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
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

    def _ends(self, *_: Any) -> None:
        if self._shared.current is not self:
            return
        self._shared.current, self._around = self._around, None
        self._watch.stop()
        if self.call.kind.unknown and sys.exc_info()[0] is None:
            self.call.kind.refusal = ELSEWHERE
        self.call.abandon()
        if self._is_alone:
            self._is_alone = False
            self._block_ends()

    def _block_ends(self, *_: Any) -> None:
        call, self.call = self.call, None
        if call is None:
            return
        self._watch.stop()
        call.abandon()
        # A refresh says nothing of steps that are encoded by what was sent before.
        is_refresh = call.layer_codecs is not None and call.layer_codecs.owes_nothing
        if call.kind and call.kind.trial:
            call.kind.trial.ran(is_usual=not is_refresh and sys.exc_info()[0] is None)

    def _goes_first(self, call: Call) -> bool:
        """Whether V is to be projected ahead now, to be sent or to rehearse."""
        kind = call.kind
        return not call.ahead and kind.refusal is None and (not kind.rehearsed or call.schedule.v_first)

    # V ahead of time.

    def _listen(self, kind: Kind) -> None:
        """Have V's projections ask for what was made ahead, and the part that comes first say so."""
        for path in kind.recipe.paths:
            self._replace(self._module.get_submodule(path), functools.partial(self._asking, path))
        if kind.trigger and kind.trigger not in self._triggers:
            inside, path = kind.trigger
            submodule = (self._module if inside else self._block).get_submodule(path)
            self._hooks.append(submodule.register_forward_pre_hook(self._triggered))
            self._triggers.add(kind.trigger)

    def _replace(self, submodule: nn.Module, by: Callable[[Callable], Callable]) -> None:
        """Put something in the place of a submodule's forward, once."""
        if submodule not in self._replaced:
            before, submodule.forward = vars(submodule).get("forward"), by(submodule.forward)
            self._replaced[submodule] = submodule.forward, before

    def _asking(self, path: str, forward: Callable) -> Callable:
        """A projection's forward that returns what was made ahead, if that is what it is asked for."""

        def ask(given: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            ahead = self.call.ahead.get(path) if self.call and not self._projecting else None
            if ahead is None or ahead.given is not given or args or kwargs:
                return forward(given, *args, **kwargs)
            self.call.asked.add(path)
            # In a rehearsal, what USP gets must not be what it is compared with.
            return ahead.returned if self.call.kind.rehearsed else forward(given)

        return ask

    def _putting_off(self, forward: Callable) -> Callable:
        """The forward of a part of an MLP that is computed when it has to be, where the schedule has it so."""

        def put_off(given: Any, *args: Any, **kwargs: Any) -> Any:
            if self.call is None or not self.call.schedule.beside or not self._shared.active():
                return forward(given, *args, **kwargs)
            later = Later(lambda: forward(made(given), *args, **kwargs))
            self.call.later.append(later)
            return later

        return put_off

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
