"""Calls of attention layers that are alike, and what is known of them.

What a kind is, is the same on every rank; what was found of it depends on values, and the ranks agree on that.
"""

import hashlib
import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from xfuser_cocodiff.engine.attention.overlap_schedule import ScheduleCandidates
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes
from xfuser_cocodiff.xdit.layers.v_source import Recipe, Source, source_of

ELSEWHERE = "it does not go through USP"


@dataclass
class LayerSignature:
    """What is known of calls that are alike: of the same class and parts, with arguments of the same shapes."""

    name: str
    key: str = ""
    """What tells it from other kinds, in other processes too."""
    source: Source | None = None
    """Projections of V in its module."""
    recipe: Recipe | None = None
    """How V is put together from them, once that was rehearsed."""
    keeps_place: bool = False
    """Whether V reaches USP where its projection has put it."""
    rehearsed: bool = False
    """Whether ranks have agreed on what there is to know of V."""
    rehearsed_by: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    """The layers of which they have found the same."""
    refusal: str | None = None
    """Why V does not go first."""
    sizes: LayerSizes | None = None
    """What this rank had of its last call, if codecs may approximate that."""
    unequal: tuple[int, ...] = ()
    """Numbers of head groups in which attention would have other bits."""
    has_parallel_mlp: bool = False
    """Whether the block has an MLP that can be computed while Q, K and V travel."""
    candidates: ScheduleCandidates | None = None
    """Its overlap schedules and the one chosen; None until they are known."""

    @property
    def ready(self) -> bool:
        """Whether V can go first."""
        return self.rehearsed and self.refusal is None

    @property
    def status(self) -> str:
        """The same in words."""
        if self.ready:
            source = f"from {' and '.join(sorted(self.recipe.paths))}" if self.recipe else "where its graph makes it"
            found = f"V can go first, {source}"
        else:
            found = f"V does not go first: {self.refusal or 'it was not called often enough'}"
        if self.unequal:
            found += f"; heads are not cut into {', '.join(map(str, self.unequal))} groups, which would change bits"
        return found


class LayerSignatures:
    """The kinds that were met."""

    def __init__(self) -> None:
        self._signatures: dict[tuple, LayerSignature] = {}

    def __iter__(self) -> Iterator[LayerSignature]:
        return iter(list(self._signatures.values()))

    def __len__(self) -> int:
        return len(self._signatures)

    def clear(self) -> None:
        """Forget them."""
        self._signatures.clear()

    def of(self, module: nn.Module, arguments: dict[str, torch.Tensor]) -> LayerSignature:
        """The kind of a call, by what is the same on every rank."""
        name = type(module).__name__
        submodules = tuple((path, type(child).__name__) for path, child in module.named_children())
        shapes = tuple((key, tuple(value.shape), value.dtype) for key, value in arguments.items())
        processor = type(getattr(module, "processor", None))
        key = type(module), processor, submodules, shapes
        if key not in self._signatures:
            sizes = [(path, tuple(value.shape)) for path, value in module.named_parameters()]
            told = name, processor.__name__, submodules, shapes, sizes, getattr(module, "heads", None)
            digest = hashlib.sha256(repr(told).encode()).hexdigest()[:16]
            self._signatures[key] = LayerSignature(name, f"{name} {digest}", source_of(module))
        return self._signatures[key]

    def of_graph(self, layer: str, value: torch.Tensor) -> LayerSignature:
        """The kind of a call in a graph, where V can always go first.

        Args:
            layer: its name; those that differ in numbers only are alike.
            value: V.
        """
        name = re.sub(r"\d+", "*", layer)
        told = name, tuple(value.shape), value.dtype
        if told not in self._signatures:
            digest = hashlib.sha256(repr(told).encode()).hexdigest()[:16]
            self._signatures[told] = LayerSignature(name, f"{name} compiled {digest}", rehearsed=True)
        return self._signatures[told]

    def report(self) -> dict[str, list[str]]:
        """For each class of modules that go through USP, what there is to say of them."""
        found: dict[str, set[str]] = {}
        for signature in self:
            if signature.refusal != ELSEWHERE:
                found.setdefault(signature.name, set()).add(signature.status)
        return {name: sorted(statuses) for name, statuses in found.items()}
