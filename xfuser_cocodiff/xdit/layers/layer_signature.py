"""What calls of layers share: by structure where V comes from, by size the overlap schedules, by shapes their bits.

All depend on values that are equal on all ranks. A new number of tokens is no new structure, and seldom a new size:
twice as many values are another one.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from xfuser_cocodiff.engine.attention.overlap_schedule import BY_HEADS, Division, OverlapSchedule
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes
from xfuser_cocodiff.xdit.layers.model_projections import Recipe, Source, find_source
from xfuser_cocodiff.xdit.layers.schedule_candidates import ScheduleCandidates

MAX_SIGNATURES = 128
"""Maximum number of signatures; that of the oldest last call is dropped, as of a text length of an old request."""


@dataclass(eq=False)
class LayerStructure:
    """What all calls of one class, submodules and dims share, with any number of tokens: where V comes from."""

    name: str
    properties: str
    """Digest of what distinguishes it from other structures, equal in all processes."""
    source: Source | None = None
    """Projections of V in the module."""
    recipe: Recipe | None = None
    """How V is built from the projections, once a layer has shown it."""
    refusal: str | None = None
    """Reason why V cannot go first."""
    reaches_usp: bool = False
    """Whether a layer has reached USP."""

    @property
    def ready(self) -> bool:
        """Whether V can go first."""
        return self.recipe is not None

    @property
    def is_known(self) -> bool:
        """Whether it is known if V can go first."""
        return self.ready or self.refusal is not None

    @property
    def status(self) -> str:
        """Text for a report: whether V can go first, from which projections or why not."""
        if self.recipe:
            return f"V can go first, from {' and '.join(sorted(self.recipe.paths))}"
        return f"V does not go first: {self.refusal or 'too few calls to know where it comes from'}"


@dataclass(eq=False)
class LayerSignature:
    """Properties of all calls of one structure, with arguments of the same shapes and one attention backend."""

    structure: LayerStructure
    key: str
    """Key of its schedules, equal in all processes; used in the tuning cache. Signatures of similar size share one."""
    sizes: LayerSizes | None = None
    """Sizes of this rank's tensors in the last call, where codecs may encode them."""
    gathers_kv: bool = False
    """Whether the last call, if it was encoded, gathered K and V."""
    is_same: dict[Division, bool] = field(default_factory=lambda: {BY_HEADS: True})
    """Whether attention is bit-identical to stock's on all ranks, by its division."""
    has_parallel_mlp: bool = False
    """Whether the block has an MLP that can be computed during the all-to-all of Q, K and V."""
    candidates: ScheduleCandidates | None = None
    """Overlap schedules of calls of its size and the one chosen; None until they are known."""

    @property
    def name(self) -> str:
        """Class of the module."""
        return self.structure.name

    @property
    def ready(self) -> bool:
        """Whether V can go first."""
        return self.structure.ready

    @property
    def schedule(self) -> OverlapSchedule:
        """The schedule of its next call, bit-identical to all heads at once."""
        if self.candidates is None:
            return OverlapSchedule()
        schedule = self.candidates.schedule
        return schedule if self.is_same.get(schedule.division) else schedule.divided(BY_HEADS)

    @property
    def is_checked(self) -> bool:
        """Whether it is known if attention by the schedule of its size is bit-identical."""
        return self.candidates is not None and self.candidates.schedule.division in self.is_same

    @property
    def unequal(self) -> tuple[int, ...]:
        """Numbers of head groups with which attention is not bit-identical."""
        return tuple(groups for (groups, gathers_kv), same in self.is_same.items() if not (same or gathers_kv))

    @property
    def status(self) -> str:
        """Text for a report: whether V can go first, and which numbers of head groups are not used."""
        numbers = ", ".join(map(str, self.unequal))
        head_groups = f"; head groups off: {numbers} of them would not be bit-identical" if numbers else ""
        return f"{self.structure.status}{head_groups}"


class LayerSignatures:
    """All structures of a session, the newest signatures, and the schedules that they share.

    Args:
        may_send_v_first: whether V may go first.
    """

    def __init__(self, may_send_v_first: bool = True) -> None:
        self._may_send_v_first = may_send_v_first
        self._structures: dict[tuple, LayerStructure] = {}
        self._signatures: dict[tuple, LayerSignature] = {}
        self.candidates: dict[str, ScheduleCandidates] = {}
        """Schedules by :attr:`LayerSignature.key`."""

    def __iter__(self) -> Iterator[LayerSignature]:
        return iter(list(self._signatures.values()))

    def __len__(self) -> int:
        return len(self._signatures)

    def clear(self) -> None:
        """Drop all signatures."""
        self._structures.clear()
        self._signatures.clear()
        self.candidates.clear()

    def of_call(self, module: nn.Module, arguments: dict[str, torch.Tensor], backend: str) -> LayerSignature:
        """Return the signature of a call in eager mode, the same on all ranks.

        Args:
            module: the attention module.
            arguments: tensors that it is called with, by name.
            backend: attention backend; head groups that are bit-identical with one may not be with another.
        """
        processor = type(getattr(module, "processor", None))
        submodules = tuple((path, type(child).__name__) for path, child in module.named_children())
        kinds = tuple((name, value.ndim, value.dtype) for name, value in arguments.items())
        hidden = hidden_states(arguments)
        dims = () if hidden is None else (*hidden.shape[:-2], *hidden.shape[-1:])
        properties = submodules, kinds, dims
        key = type(module), processor, properties
        if key not in self._structures:
            name = type(module).__name__
            sizes = [(path, tuple(value.shape)) for path, value in module.named_parameters()]
            digest = _digest((name, processor.__name__, *properties, sizes, getattr(module, "heads", None)))
            self._structures[key] = structure = LayerStructure(name, digest, find_source(module))
            if not self._may_send_v_first:
                structure.refusal = "--cocodiff_v_first off"
            elif structure.source is None:
                structure.refusal = "its module has no known projection of V"
        return self._signature(self._structures[key], arguments.values(), backend)

    def _signature(self, structure: LayerStructure, tensors: Iterable[torch.Tensor], backend: str) -> LayerSignature:
        """Return the signature of a call with these tensors, the newest one from now on."""
        shapes = tuple(tensor.shape for tensor in tensors)
        key = structure, shapes, backend
        signature = self._signatures.pop(key, None)
        if signature is None:
            size = sum(map(math.prod, shapes)).bit_length()
            signature = LayerSignature(structure, f"{structure.name} {_digest((structure.properties, size, backend))}")
            if len(self._signatures) == MAX_SIGNATURES:
                del self._signatures[next(iter(self._signatures))]
        self._signatures[key] = signature
        return signature

    def report(self) -> dict[str, list[str]]:
        """Return the statuses of all signatures that go through USP, by class of module."""
        statuses: dict[str, set[str]] = {}
        for signature in self:
            if signature.structure.reaches_usp:
                statuses.setdefault(signature.name, set()).add(signature.status)
        return {name: sorted(each) for name, each in statuses.items()}


def hidden_states(arguments: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """Return the hidden states among the arguments of a module: by name, else the first."""
    return arguments.get("hidden_states", next(iter(arguments.values()), None))


def _digest(properties: tuple) -> str:
    return hashlib.sha256(repr(properties).encode()).hexdigest()[:16]
