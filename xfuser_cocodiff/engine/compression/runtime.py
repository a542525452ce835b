"""Runs, steps and branches, and the references that belong to them.

References live from the first step of a run to its last, for one layer in one branch (of classifier-free guidance).
Nothing of one run is ever read in another: a new run begins with none, however the one before it ended. Where a run
goes on with another transformer, those of the one before it go.
"""

import difflib
import itertools
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

import torch

from xfuser_cocodiff.engine.compression import modes
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.codecs import EXACT, QuantError
from xfuser_cocodiff.engine.compression.layer_codecs import CodecStats, LayerCodecs, LinkState
from xfuser_cocodiff.engine.compression.modes import CodecSchedule
from xfuser_cocodiff.engine.compression.reference_memory import GIB, LayerSizes, ReferenceBytes
from xfuser_cocodiff.engine.compression.virtual_ranks import VirtualRanks
from xfuser_cocodiff.engine.topology import devices as devices

_EXCHANGES = 2
"""Of a layer: of Q, K and V, and of O. How they go is asked for one of a middle size."""


@dataclass
class _State:
    """Of one layer in one branch."""

    layer: str
    transformer: Hashable
    need: ReferenceBytes
    is_exact: bool
    """Whether it always travels exactly, and holds no references: the schedule or the budget wants it so."""
    single_stage: bool
    """How its exchanges go, see :mod:`exchange`."""
    link_states: dict = field(default_factory=dict)
    ring_link_states: dict = field(default_factory=dict)
    stats: CodecStats = field(default_factory=CodecStats)
    """Of the step."""
    step: int = 0
    """At which it was met last."""


def _numbers(losses: list[QuantError]) -> list[tuple[float, float]]:
    """What lacks, and of what: the host waits for a device once."""
    together = torch.stack([each for loss in losses for each in loss]).tolist() if losses else []
    return list(zip(together[::2], together[1::2], strict=True))


@dataclass
class StepReport:
    """What codecs did at one step."""

    step: int
    errors: dict[str, float]
    """Relative, of what receivers hold, for each layer."""
    sent_bytes: int
    """To other places on slow axes, by this rank as the first."""
    exact_bytes: int
    """What that would have been without codecs."""
    repeated: int
    """Exchanges that went exactly, since there were values that are not finite, or that were not and are followed by an
    exact step, as on accelerators."""
    unsound: int
    """Those of them that were not."""
    was_keyframe: bool
    """Whether it owed nothing to steps before it."""
    reference_bytes: int
    """What references take."""
    exact_layers: int
    """Layers, for each branch, that always travel exactly."""

    @property
    def error(self) -> float:
        """The largest."""
        return max(self.errors.values(), default=0.0)


class CodecRuntime:
    """What codecs know of the run under way. All ranks must call its methods alike.

    Args:
        partition: slow axes of a Ulysses group; None where it has none, and where ranks are virtual.
        mode: one of options.MODES that approximates.
        changes: to its schedule, in its notation.
        max_error: relative error of a layer above which the next step is a refresh; None never asks for one.
        agreed: given numbers, the largest of all ranks for each.
        virtual: the ranks that this one stands for, in the place of slow axes.
        budget: bytes that references may take on each rank.
        say: tells the user what is normal.
        warn: tells the user what to act on.
        ring_partition: slow axes of a ring, if there are any.
    """

    def __init__(
        self,
        partition: AxisPartition | None,
        mode: str,
        changes: str | None,
        max_error: float | None,
        agreed: Callable[[list[float]], list[float]],
        virtual: VirtualRanks | None = None,
        budget: int | None = None,
        say: Callable[[str], None] = lambda message: None,
        warn: Callable[[str], None] = lambda message: None,
        ring_partition: AxisPartition | None = None,
    ) -> None:
        self.virtual = virtual
        self._budget, self._say, self._warn = budget, say, warn
        self._compact = False
        """Whether references are kept in 8 bits."""
        self._said: set[str] = set()
        """What need not be said again."""
        self._told = 0
        """Layers of this run, for each branch, that the user has been told of."""
        self._transformers: set[Hashable] = set()
        """Those that this run has called."""
        self.has_coded_layers = False
        """Whether there was a layer in this run that it understood."""
        self.inactive_reason: str | None = None
        """Why it has understood a layer of this run not."""
        self._partition, self._ring_partition, self.mode, self._changes = partition, ring_partition, mode, changes
        self._max_error, self._agreed = max_error, agreed
        self._states: dict[tuple[Hashable, int], _State] = {}
        self.is_running = False
        self._forces_keyframe = self._mends = False
        self._is_certain = True
        self.schedule = self._schedule(None)
        self.step = 0
        self.total: int | None = None
        self.reports: list[StepReport] = []
        """Of the run's steps so far."""

    def _schedule(self, total: int | None) -> CodecSchedule:
        preset = modes.preset(self.mode, total) or CodecSchedule()
        return CodecSchedule.parse(self._changes, preset) if self._changes else preset

    def begin_run(self, total: int | None, step: int = 0, is_certain: bool = True) -> None:
        """A run begins.

        Args:
            total: its steps, if that is known.
            step: at which it goes on, with no references, where another one came between.
            is_certain: whether it is one, and does not only look like it: what begins is sent exactly then.
        """
        self.end_run()
        self.is_running, self._told = True, 0
        self._forces_keyframe = self._mends = False
        self.inactive_reason, self.has_coded_layers = None, False
        self.schedule, self._is_certain = self._schedule(total), is_certain
        self.step, self.total = step, total
        self._transformers.clear()
        self._compact, self.reports = False, []

    def end_run(self) -> None:
        """The run is over, or broken off: its references go."""
        self.is_running = False
        self._states.clear()

    def disable(self, reason: str) -> None:
        """A layer of this run is not understood, and travels exactly."""
        self.inactive_reason = reason

    def end_step(self) -> None:
        """A step is over."""
        if not self.is_running:
            return
        report = self._report()
        self.reports.append(report)
        self._tell(report)
        if self._max_error is not None or self._defers:
            largest, unsound = self._agreed([report.error, float(report.unsound)])
            self._mends = unsound > 0
            self._forces_keyframe = self._mends or (self._max_error is not None and largest > self._max_error)
        self.step += 1
        if self.step == self.total:
            self.end_run()

    def _report(self) -> StepReport:
        errors: dict[str, float] = {}
        accounts = [state.stats for state in self._states.values()]
        figures, broken = iter(_numbers([loss for stats in accounts for loss in stats.losses])), 0
        for state, stats in zip(self._states.values(), accounts, strict=True):
            losses = list(itertools.islice(figures, len(stats.losses)))
            finite = [loss for loss in losses if math.isfinite(loss[0])]
            broken += len(losses) - len(finite)
            lacking, wanted = (sum(column) for column in zip(*finite, strict=True)) if finite else (0.0, 0.0)
            error = math.sqrt(lacking / wanted) if wanted else 0.0
            errors[state.layer] = max(error, errors.get(state.layer, 0.0))
            state.stats = CodecStats()
        unsound = broken if self._defers else 0  # elsewhere they were repeated
        return StepReport(
            self.step,
            errors,
            sum(stats.sent_bytes for stats in accounts),
            sum(stats.exact_bytes for stats in accounts),
            sum(stats.repeated for stats in accounts) + unsound,
            unsound,
            self._forces_keyframe or self.schedule.is_keyframe_step(self.step),
            self.reference_bytes,
            sum(state.is_exact for state in self._states.values()),
        )

    def layer_codecs(
        self, layer: str, key: Hashable, branch: int, share: LayerSizes, transformer: Hashable = None
    ) -> LayerCodecs | None:
        """How the exchanges of a layer's Ulysses group travel in a call of its transformer; None where they travel
        without codecs.

        Args:
            layer: its name.
            key: tells it from the layers of other transformers.
            branch: which call of the transformer within the step this is.
            share: what this rank has of the layer.
            transformer: tells its transformer from others.
        """
        state = self._met(layer, key, branch, share, transformer)
        if state is None or not (self._partition or self.virtual):
            return None
        return self._at_this_step(state, self._partition, state.link_states)

    def ring_codecs(
        self, layer: str, key: Hashable, branch: int, share: LayerSizes, transformer: Hashable = None
    ) -> LayerCodecs | None:
        """The same of the ring that the layer's K and V go round."""
        state = self._met(layer, key, branch, share, transformer)
        return (
            self._at_this_step(state, self._ring_partition, state.ring_link_states)
            if state and self._ring_partition
            else None
        )

    def _met(self, layer: str, key: Hashable, branch: int, share: LayerSizes, transformer: Hashable) -> _State | None:
        """What there is of a layer that is coded."""
        if not self.is_running:
            return None
        if (key, branch) not in self._states:
            self._states[key, branch] = self._state(layer, transformer, share)
        state = self._states[key, branch]
        state.step = self.step
        if not state.is_exact:
            return state
        state.stats.sent_bytes = state.stats.exact_bytes = share.crossing_bytes(self._places, self._ring_places)
        return None

    def _at_this_step(self, state: _State, partition: AxisPartition | None, link_states: dict) -> LayerCodecs:
        layer = state.layer
        codecs = self.schedule.codecs(self.step, self.total, layer)
        keyframe_codec = (
            self.schedule.keyframe_codec if self._is_certain else replace(EXACT, predictor=self.schedule.predictor)
        )
        if self._forces_keyframe:
            # Where a reference is not finite, its change is not either: what is held now is all that is kept.
            predictors = {name: 0.0 if self._mends else codec.predictor for name, codec in codecs.items()}
            codecs = {name: replace(EXACT, predictor=predictor) for name, predictor in predictors.items()}
        else:
            codecs = {name: keyframe_codec if codec.is_keyframe else codec for name, codec in codecs.items()}
        return LayerCodecs(
            partition, codecs, link_states, state.stats, self.step, self._compact, keyframe_codec, state.single_stage
        )

    @property
    def _defers(self) -> bool:
        """Whether what is not finite is only seen when a step has ended."""
        partition = self._partition or self._ring_partition
        return partition is not None and devices.capabilities(partition.slow.comm_stream.device.type).is_asynchronous

    @property
    def _places(self) -> int:
        """On slow axes of a Ulysses group."""
        found = self._partition if self.virtual is None or self.virtual.is_ring else self.virtual
        return found.num_slow if found else 1

    @property
    def _ring_places(self) -> int:
        """On those of a ring."""
        found = self.virtual if self.virtual and self.virtual.is_ring else self._ring_partition
        return found.num_slow if found else 1

    def _state(self, layer: str, transformer: Hashable, share: LayerSizes) -> _State:
        """Of a layer that is met in a branch for the first time in this run."""
        self.has_coded_layers = True
        if self.schedule.allocation:
            self.schedule.allocation.check_layer(layer)
        if transformer not in self._transformers:
            self._leave_others()
            self._transformers.add(transformer)
        need = ReferenceBytes.of(share, self.schedule, self._places, self._ring_places)
        is_exact = self.schedule.leaves_out(layer)
        if not is_exact and not self._has_room(need):
            self._squeeze()
            is_exact = not self._has_room(need)
        single_stage = self._partition is not None and self._partition.is_single_stage(
            share.values // _EXCHANGES * share.value_bytes
        )
        return _State(layer, transformer, need, is_exact, single_stage)

    def _has_room(self, need: ReferenceBytes) -> bool:
        """Whether the references of one more layer may be held."""
        return self._budget is None or self.planned_reference_bytes + need[self._compact] <= self._budget

    def _leave_others(self) -> None:
        """Another transformer is called for the first time. Those that had no call at this step have done their part;
        one that comes back after all begins exactly. All ranks call alike."""
        self._told = 0
        current = {state.transformer for state in self._states.values() if state.step == self.step}
        for key, state in list(self._states.items()):
            if state.transformer not in current:
                del self._states[key]

    def _squeeze(self) -> None:
        """Keep references in 8 bits from now on."""
        if not self._compact:
            self._compact = True
            for state in self._states.values():
                on_stream = self._partition and self._partition.fast and not state.single_stage
                for link_state in state.link_states.values():
                    link_state.to_int8(self._partition.fast.comm_stream if on_stream else None)
                for link_state in state.ring_link_states.values():  # whose both ends are used in the lane
                    self._ring_partition.slow.comm_stream.start("squeezing references", link_state.to_int8).wait()

    # What the user is told, once a step has shown it.

    def _tell(self, report: StepReport) -> None:
        if len(self._states) > self._told:
            self._tell_references()
            self._tell_unmatched()
            self._told = len(self._states)
        if not report.was_keyframe and report.sent_bytes and report.exact_layers < len(self._states):
            mode = f"{self.mode}@{self._changes}" if self._changes else self.mode
            self._once(
                self._say,
                f"mode {self.mode!r}: {self.schedule}; the error depends on the model and the number of steps: measure "
                f"it with cocodiff quality --model NAME --steps {self.total or 'N'} --mode {mode!r}",
            )

    def _tell_references(self) -> None:
        wanting = [state for state in self._states.values() if not self.schedule.leaves_out(state.layer)]
        full, compact = (sum(state.need[kept] for state in wanting) for kept in (False, True))
        kept = " (in use)" if self._compact else ""
        bound = "; --cocodiff_memory_budget sets a limit" if self._budget is None else ""
        layers, branches = len({key for key, _ in self._states}), 1 + max(branch for _, branch in self._states)
        guided = f" and {branches} guidance branches" if branches > 1 else ""
        self._once(
            self._say,
            f"link references of {layers} layers{guided}: {full / GIB:.3g} GiB per rank, "
            f"{compact / GIB:.3g} GiB in 8 bits{kept}{bound}",
        )
        exact = sum(state.is_exact for state in wanting)
        if exact and self._budget is not None:
            self._warn(  # in every run
                f"{exact} of {len(wanting)} layers are lossless: their link references exceed the memory budget of "
                f"{self._budget / GIB:.3g} GiB; raise --cocodiff_memory_budget"
            )

    def _tell_unmatched(self) -> None:
        layers = sorted({state.layer for state in self._states.values()})
        for name in self.schedule.unmatched(layers):
            prefixes = {".".join(layer.split(".")[:count]) for layer in layers for count in (1, 2, 3, 4)}
            near = difflib.get_close_matches(name, sorted(prefixes), 3, 0.0)
            self._once(self._warn, f"exact={name} matches no layer; the nearest are {', '.join(near)}")

    def _once(self, say: Callable[[str], None], message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            say(message)

    @property
    def planned_reference_bytes(self) -> int:
        """What references are going to take, once all that is extrapolated from is held too."""
        return sum(state.need[self._compact] for state in self._states.values() if not state.is_exact)

    @property
    def reference_bytes(self) -> int:
        """What references take now."""
        return sum(link_state.nbytes for link_state in self._link_states)

    @property
    def _link_states(self) -> list[LinkState]:
        """All that there are, in an order that is the same on every rank."""
        every = [
            link_states
            for state in self._states.values()
            for link_states in (state.link_states, state.ring_link_states)
        ]
        return [link_state for link_states in every for link_state in link_states.values()]
