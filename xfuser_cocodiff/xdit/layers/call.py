"""A call of an attention layer that is under way, and what is noted of one that there is something to learn from."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from xfuser_cocodiff.attention.schedule import Schedule
from xfuser_cocodiff.codec.layer_codecs import LayerCodecs
from xfuser_cocodiff.exchange.lane import Handle
from xfuser_cocodiff.xdit.layers.kind import Argument, Kind
from xfuser_cocodiff.xdit.layers.later import Later
from xfuser_cocodiff.xdit.layers.v_source import Called


@dataclass
class Call:
    """A call under way: from where its block begins to where it ends."""

    schedule: Schedule
    kind: Kind | None = None
    arguments: dict[Argument, torch.Tensor] = field(default_factory=dict)
    before: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    """Parts of the block that were called before the module, and what they were given; while the call is watched."""
    submodules: list[Called] = field(default_factory=list)
    """Of the module, while the call is watched."""
    ahead: dict[str, Called] = field(default_factory=dict)
    """Projections that were made ahead of time."""
    asked: set[str] = field(default_factory=set)
    """Those of them that the processor has asked for since."""
    handle: Handle | None = None
    """V's exchange."""
    layer_codecs: LayerCodecs | None = None
    """How its exchanges are encoded, once one of them was."""

    later: list[Later] = field(default_factory=list)
    """What the block needs once it has attended, as far as it was asked for and not made."""

    def catch_up(self) -> None:
        """Make what was put off."""
        for one in self.later:
            one.made()
        self.later.clear()

    def value_ahead(self) -> torch.Tensor:
        """V, of projections that were made ahead of time."""
        return self.kind.recipe.build(lambda path: self.ahead[path].returned)

    def abandon(self) -> None:
        """Forget what was done ahead."""
        if self.handle:
            self.handle.abandon()
        self.handle, self.ahead = None, {}


class Watch:
    """Hooks by which a call is watched."""

    def __init__(self) -> None:
        self._hooks: list[Any] = []

    def block(self, block: nn.Module, module: nn.Module, call: Call) -> None:
        """Note what other submodules of the block are given, until it comes to the module."""
        for path, submodule in block.named_children():
            if submodule is not module:

                def note(_: nn.Module, args: tuple, path: str = path) -> None:
                    call.before.extend((path, value) for value in args[:1] if torch.is_tensor(value))

                self._hooks.append(submodule.register_forward_pre_hook(note))

    def submodules(self, module: nn.Module, call: Call) -> None:
        """Note what the module's own are given, and what they return."""
        for path, submodule in module.named_modules():
            if path:

                def note(_: nn.Module, args: tuple, returned: Any, path: str = path) -> None:
                    if args and torch.is_tensor(args[0]) and torch.is_tensor(returned):
                        call.submodules.append(Called(path, args[0], returned))

                self._hooks.append(submodule.register_forward_hook(note))

    def stop(self) -> None:
        """Leave the modules as they were."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
