"""Signatures of layer calls: what all calls of the same class, submodules, shapes and attention backend share.

A signature depends on values that are equal on all ranks. What is verified about it depends on tensors, so that the
ranks have to agree on it.
"""

import hashlib
import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from xfuser_cocodiff.engine.attention.overlap_schedule import OverlapSchedule, ScheduleCandidates
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes
from xfuser_cocodiff.xdit.layers.v_source import Recipe, Source, find_source

NOT_THROUGH_USP = "its attention does not go through USP"


@dataclass
class LayerSignature:
    """Properties of all calls of one class and submodules, with arguments of the same shapes and one backend."""

    name: str
    key: str = ""
    """Key of the signature, equal in all processes; used in the tuning cache."""
    source: Source | None = None
    """Projections of V in the module."""
    recipe: Recipe | None = None
    """Verified way to build V from the projections."""
    in_place: bool = False
    """Whether the V that reaches USP is a view of its projections."""
    verified: bool = False
    """Whether the ranks have agreed on :attr:`recipe` or :attr:`refusal`."""
    verified_layers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    """Layers that were verified."""
    refusal: str | None = None
    """Reason why V cannot go first."""
    sizes: LayerSizes | None = None
    """Sizes of this rank's tensors in the last call, where codecs may encode them."""
    gathers_kv: bool = False
    """Whether the last call, if it was encoded, gathered K and V."""
    unequal: tuple[int, ...] = ()
    """Numbers of head groups with which attention is not bit-identical."""
    has_parallel_mlp: bool = False
    """Whether the block has an MLP that can be computed during the all-to-all of Q, K and V."""
    candidates: ScheduleCandidates | None = None
    """Its overlap schedules and the one chosen; None until they are known."""

    @property
    def ready(self) -> bool:
        """Whether V can go first."""
        return self.verified and self.refusal is None

    @property
    def schedule(self) -> OverlapSchedule:
        """The schedule of its next call."""
        return self.candidates.schedule if self.candidates else OverlapSchedule()

    @property
    def status(self) -> str:
        """Text for a report: whether V can go first, from which projections or why not."""
        if self.ready:
            source = f"from {' and '.join(sorted(self.recipe.paths))}" if self.recipe else "in a compiled graph"
            status = f"V can go first, {source}"
        else:
            status = f"V does not go first: {self.refusal or 'too few calls to verify it'}"
        if self.unequal:
            status += f"; head groups off: {', '.join(map(str, self.unequal))} of them would not be bit-identical"
        return status


class LayerSignatures:
    """All signatures of a session."""

    def __init__(self) -> None:
        self._signatures: dict[tuple, LayerSignature] = {}

    def __iter__(self) -> Iterator[LayerSignature]:
        return iter(list(self._signatures.values()))

    def __len__(self) -> int:
        return len(self._signatures)

    def clear(self) -> None:
        """Drop all signatures."""
        self._signatures.clear()

    def of_call(self, module: nn.Module, arguments: dict[str, torch.Tensor], backend: str) -> LayerSignature:
        """Return the signature of a call in eager mode, the same on all ranks.

        Args:
            module: the attention module.
            arguments: tensors that it is called with, by name.
            backend: attention backend; head groups that are bit-identical with one may not be with another.
        """
        name = type(module).__name__
        submodules = tuple((path, type(child).__name__) for path, child in module.named_children())
        shapes = tuple((key, tuple(value.shape), value.dtype) for key, value in arguments.items())
        processor = type(getattr(module, "processor", None))
        key = type(module), processor, submodules, shapes, backend
        if key not in self._signatures:
            sizes = [(path, tuple(value.shape)) for path, value in module.named_parameters()]
            properties = name, processor.__name__, submodules, shapes, sizes, getattr(module, "heads", None), backend
            self._signatures[key] = LayerSignature(name, f"{name} {_digest(properties)}", find_source(module))
        return self._signatures[key]

    def of_graph(self, layer: str, value: torch.Tensor) -> LayerSignature:
        """Return the signature of a call in a compiled graph, where V can always go first.

        Args:
            layer: path of the layer; paths that differ in numbers only have the same signature.
            value: V.
        """
        name = re.sub(r"\d+", "*", layer)
        key = name, tuple(value.shape), value.dtype
        if key not in self._signatures:
            self._signatures[key] = LayerSignature(name, f"{name} compiled {_digest(key)}", verified=True)
        return self._signatures[key]

    def report(self) -> dict[str, list[str]]:
        """Return the statuses of all signatures that go through USP, by class of module."""
        statuses: dict[str, set[str]] = {}
        for signature in self:
            if signature.refusal != NOT_THROUGH_USP:
                statuses.setdefault(signature.name, set()).add(signature.status)
        return {name: sorted(each) for name, each in statuses.items()}


def _digest(properties: tuple) -> str:
    return hashlib.sha256(repr(properties).encode()).hexdigest()[:16]
