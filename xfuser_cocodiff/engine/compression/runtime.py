"""Runs, steps and guidance branches, and the link references that belong to them.

References live from the first step of a run to its last, for one layer in one branch of classifier-free guidance. No
run reads those of another: a run begins without any, however the one before it ended. If a run continues with another
transformer, the references of the one before it are dropped.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from statistics import fmean

from xfuser_cocodiff.engine.codec.codec import EXACT
from xfuser_cocodiff.engine.compression import modes, reference_memory
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.error_readout import ErrorReadout
from xfuser_cocodiff.engine.compression.layer_codecs import CodecStats, LayerCodecs, LinkState
from xfuser_cocodiff.engine.compression.layer_state import LayerState
from xfuser_cocodiff.engine.compression.modes import CodecSchedule
from xfuser_cocodiff.engine.compression.rate_control import RateControl
from xfuser_cocodiff.engine.compression.reference_memory import GIB, LayerSizes, ReferenceBytes
from xfuser_cocodiff.engine.compression.run_report import RunReporter
from xfuser_cocodiff.engine.compression.step_report import RunErrors, StartedReport, StepReport
from xfuser_cocodiff.engine.compression.virtual_ranks import VirtualRanks
from xfuser_cocodiff.engine.topology import devices
from xfuser_cocodiff.engine.topology.device_memory import DeviceMemory

_MESSAGES_PER_LAYER = 2
"""Number of messages of a layer: Q, K and V, and O. Their number of stages is chosen for their mean size."""
_TENSORS, _GATHERED_TENSORS = 4, 2
"""Number of tensors of a layer that are coded: Q, K, V and O, or K and V where these are gathered."""
_DRIFT = GIB // 2
"""Free memory that a run may lack against an earlier one like it, and code the same layers: its images stay the same
although kernels and communicators have been loaded since."""


class CodecRuntime:
    """Codecs and link references of the current run. All ranks must call its methods in the same order.

    Args:
        partition: slow and fast axes of the Ulysses group; None if it has no slow axis, or with virtual ranks.
        mode: a lossy mode, one of options.MODES.
        overrides: changes to the mode's schedule, in its notation.
        sum_over_ranks: returns the sum over all ranks that share the sequence for each of some numbers.
        virtual_ranks: ranks to simulate instead of communication.
        memory_budget: bytes that link references may take on each rank; None for the default.
        info: logs what is normal.
        warn: logs what a user should act on.
        ring_partition: slow and fast axes of the ring; None if it has no slow axis.
        device_memory: reads the memory of this rank's device, for the default budget; None for no limit by default,
            the same on all ranks.
        min_over_ranks: returns the minimum over all ranks for each of some numbers; of one rank if not given.
    """

    def __init__(
        self,
        partition: AxisPartition | None,
        mode: str,
        overrides: str | None,
        sum_over_ranks: Callable[[list[float]], list[float]],
        virtual_ranks: VirtualRanks | None = None,
        memory_budget: int | None = None,
        info: Callable[[str], None] = lambda message: None,
        warn: Callable[[str], None] = lambda message: None,
        ring_partition: AxisPartition | None = None,
        device_memory: Callable[[], DeviceMemory | None] | None = None,
        min_over_ranks: Callable[[list[float]], list[float]] = list,
    ) -> None:
        self.virtual_ranks = virtual_ranks
        self._given_budget, self._device_memory = memory_budget, device_memory
        self._default_budgets: dict[Hashable, float] = {}
        """Default budgets of this rank, by the runs that have had them."""
        self._budget = math.inf
        """Bytes that link references of this run may take, the same on all ranks."""
        self._partition, self._ring_partition, self.mode = partition, ring_partition, mode
        self._sum_over_ranks, self._min_over_ranks = sum_over_ranks, min_over_ranks
        self._predicts = False
        """Whether references are extrapolated in this run, by the schedule and as far as memory suffices."""
        self._transformers: set[Hashable] = set()
        """Transformers that this run has called."""
        self._states: dict[tuple[Hashable, int], LayerState] = {}
        """Layer states by layer and branch."""
        self._num_branches = 1
        """Number of branches in which any layer has been called."""
        self.has_coded_layers = False
        """Whether a layer of this run has asked for codecs."""
        self.inactive_reason: str | None = None
        """Why compression is inactive for a layer of this run."""
        self.is_running = False
        """Whether a run is in progress."""
        self._recovers = False
        """Whether the current step is lossless regardless of the schedule; whether values were not finite before it."""
        self.yardsticks: dict[str, float] = {}
        """Mean errors of FP8 and FP4 on this rank's tensors of the first run's first step."""
        self.value_bytes = 0
        """Bytes of a value without codecs, in the last step."""
        self.fixed_bits: Sequence[float] | None = None
        """Bits per value of each step, in place of what rate control would choose; for runs without values."""
        preset = modes.PRESETS.get(mode, CodecSchedule())
        self.schedule = CodecSchedule.parse(overrides, preset) if overrides else preset
        """Codec schedule of all runs."""
        axes = (name for part in (partition, ring_partition) if part for name in part.slow_axis_names)
        self.reporter = RunReporter(mode, overrides, self.schedule, axes, info, warn)
        self._rate: RateControl | None = None
        """Choice of the run's bits; None where the schedule has them."""
        self.step = self._first_step = 0
        """Current step, from 0, and that at which the run began."""
        self.total: int | None = None
        """Number of steps; None if unknown."""
        self._started: list[StartedReport] = []
        """Reports of the run's steps so far."""

    def begin_run(self, total: int | None, step: int = 0) -> None:
        """Begin a run, without references.

        Args:
            total: number of steps; None if unknown.
            step: step at which the run continues after another one interrupted it.
        """
        self.end_run()
        self.reporter.expect_layers()
        self.is_running, self._recovers = True, False
        self.inactive_reason, self.has_coded_layers = None, False
        self._rate = RateControl(self.schedule.error) if self.schedule.error else None
        self.step, self._first_step, self.total = step, step, total
        self._transformers.clear()
        self._predicts, self._started = bool(self.schedule.predictor), []

    def end_run(self, is_complete: bool = False) -> None:
        """End the run, or abort it, and drop its references.

        Args:
            is_complete: whether it was not aborted. Its errors are then logged: those of all ranks after the last step,
                which every rank reaches; else those of this rank, since others might not call the collective.
        """
        was_running, self.is_running = self.is_running, False
        self._states.clear()
        if not (was_running and is_complete):
            return
        # The host may wait for the last errors: no step is left whose launches would be late.
        reports, is_last = self.reports, self.step == self.total
        sum_over_ranks = self._sum_over_ranks if is_last else list
        errors = RunErrors.of(reports, self.yardsticks, self.value_bytes, sum_over_ranks)
        has_yardsticks = any(each.yardstick_errors for each in reports)
        self.reporter.log_errors(errors, self._first_step, is_last, has_yardsticks)

    def disable(self, reason: str) -> None:
        """Note that a layer of this run is unsupported and stays lossless."""
        self.inactive_reason = reason

    def end_step(self) -> None:
        """End a step: report it, and let its errors decide on later ones.

        On accelerators the step before decides, whose errors have arrived by now: for those of this step the host would
        wait, and the device would then wait for the host.
        """
        if not self.is_running:
            return
        self.value_bytes = max((state.sizes.value_bytes for state in self._states.values()), default=0)
        started = self._start_report()
        self._started.append(started)
        is_default = self._given_budget is None
        self.reporter.log_step(started.report, self._states, self.total, self._predicts, self._budget, is_default)
        if not self._checks_after_step:
            self._use_errors(self._read(started))
        elif len(self._started) > 1:
            self._use_errors(self._read(self._started[-2]))
        self.step += 1
        if self.step == self.total:
            self.end_run(is_complete=True)

    def _use_errors(self, report: StepReport) -> None:
        """Choose the bits of later steps by the errors of a step on all ranks, and recover from values not finite.

        A step after those values was lossless has replaced wrong references already.
        """
        if self._rate is None and not self._checks_after_step:
            return  # values that are not finite were repeated
        *sums, not_finite = self._sum_over_ranks([*report.error_sums, float(report.not_finite)])
        if self._rate:
            self._rate.note(report.step, *sums)
        self._recovers = not_finite > 0 and not self._recovers

    @property
    def reports(self) -> list[StepReport]:
        """Reports of the run's steps so far. On accelerators the host waits for the last step's errors."""
        return [self._read(each) for each in self._started]

    def _read(self, started: StartedReport) -> StepReport:
        """Return the report of a step with its errors, and note those of the yardsticks."""
        report = started.read()
        if report.yardstick_errors:
            self.yardsticks = {name: fmean(errors) for name, errors in report.yardstick_errors.items()}
        return report

    def _start_report(self) -> StartedReport:
        """Start the report of the current step, and reset the statistics."""
        states = list(self._states.values())
        stats = [state.stats for state in states]
        was_keyframe = self._recovers or self.schedule.is_keyframe_step(self.step)
        report = StepReport(
            self.step,
            dict.fromkeys((state.layer for state in states), 0.0),
            {},
            {},
            None if was_keyframe else self._bits,
            sum(each.sent_bytes for each in stats),
            sum(each.exact_bytes for each in stats),
            sum(each.repeated for each in stats),
            0,
            was_keyframe,
            self.reference_bytes,
            sum(state.is_exact for state in self._states.values()),
            tuple(dict.fromkeys(each.layer for each in self._states.values() if each.gathers_kv and not each.is_exact)),
        )
        names = [
            (each.layer, letter, each.has_references and (was_keyframe or each.first_step < self.step))
            for each in states
            for letter, _ in each.stats.quant_errors
        ]
        readout = ErrorReadout([error for state in states for _, error in state.stats.quant_errors])
        for state in states:
            state.stats = CodecStats()
        return StartedReport(report, names, not self._checks_after_step, readout)

    def drop_layer(self, key: Hashable, branch: int) -> None:
        """Drop the references of a layer in a branch, whose next call begins with a keyframe.

        Args:
            key: key of the layer.
            branch: number of the transformer's call within the step.
        """
        self._states.pop((key, branch), None)

    def layer_codecs(
        self,
        layer: str,
        key: Hashable,
        branch: int,
        sizes: LayerSizes,
        transformer: Hashable = None,
        gathers_kv: bool = False,
        gathers_lossless: bool = False,
        batched_branches: int = 1,
    ) -> LayerCodecs | None:
        """Return the codecs of a layer's Ulysses group at this step, or None if it is lossless.

        Args:
            layer: name of the layer.
            key: distinguishes the layer from those of other transformers.
            branch: number of the transformer's call within the step.
            sizes: sizes of the layer's tensors on this rank.
            transformer: distinguishes the layer's transformer from others.
            gathers_kv: whether K and V are gathered along the slow axes, if this call is the layer's first in the run.
            gathers_lossless: whether they are gathered if the layer is lossless; by heads when not given.
            batched_branches: number of branches in the call's batch.
        """
        state = self._state_of(layer, key, branch, sizes, transformer, batched_branches, gathers_kv, gathers_lossless)
        layout = self._partition or self.virtual_ranks
        if state is None or layout is None:
            return None
        leader, keeps_values = self._leader_of(state, key, branch), self._is_followed(key, branch)
        return replace(
            self._codecs_of(state, self._partition, state.link_states),
            leader=leader.link_states if leader else None,
            keeps_values=keeps_values,
            batched_branches=batched_branches,
        )

    def ring_codecs(
        self,
        layer: str,
        key: Hashable,
        branch: int,
        sizes: LayerSizes,
        transformer: Hashable = None,
        batched_branches: int = 1,
    ) -> LayerCodecs | None:
        """Return the codecs of a layer's K and V in the ring at this step; see :meth:`layer_codecs`."""
        state = self._state_of(layer, key, branch, sizes, transformer, batched_branches)
        if state is None or self._ring_partition is None:
            return None
        leader, keeps_values = self._leader_of(state, key, branch), self._is_followed(key, branch)
        return replace(
            self._codecs_of(state, self._ring_partition, state.ring_link_states),
            leader=leader.ring_link_states if leader else None,
            keeps_values=keeps_values,
            batched_branches=batched_branches,
        )

    def _leader_of(self, state: LayerState, key: Hashable, branch: int) -> LayerState | None:
        """Return a layer's state in the branch that leads another one; None where each is coded by itself.

        So are branches whose texts have different lengths.
        """
        leader = self._states.get((key, 0)) if branch and self.schedule.joint else None
        of_both = {
            (each.is_exact, each.has_references, each.single_stage, each.gathers_kv, each.sizes)
            for each in (state, leader)
            if each
        }
        return leader if len(of_both) == 1 else None

    def _is_followed(self, key: Hashable, branch: int) -> bool:
        """Return whether a layer's values are kept for other branches.

        Whether there are others is not known in the first step. If previous references are planned, there is memory
        then for values of up to two bytes: no reference has a previous one yet. In later steps, memory is planned with
        the first branch that follows in the same way. Branches use it unless they were left out when the leading one
        was called last.
        """
        if branch or not self.schedule.joint:
            return False
        if self.step == self._first_step:
            has_memory = math.isinf(self._budget) or self._states[key, branch].sizes.value_bytes <= 2
            return self._predicts and has_memory
        previous_step = self._states[key, 0].previous_step
        return any(each.last_step >= previous_step and self._leader_of(each, key, 1) for each in self._followers(key))

    def _followers(self, key: Hashable) -> list[LayerState]:
        """Return a layer's states in other branches than the first; a cache may have skipped it in some."""
        states = (self._states.get((key, branch)) for branch in range(1, self._num_branches))
        return [state for state in states if state]

    def _state_of(
        self,
        layer: str,
        key: Hashable,
        branch: int,
        sizes: LayerSizes,
        transformer: Hashable,
        batched_branches: int,
        gathers_kv: bool = False,
        gathers_lossless: bool = False,
    ) -> LayerState | None:
        """Return the state of a layer, created at its first call; None outside of runs and for lossless layers."""
        if not self.is_running:
            return None
        if (key, branch) not in self._states:
            leader = self._states.get((key, 0)) if branch and self.schedule.joint else None
            # The first branch that follows another counts the values that are kept for all.
            followers = self._followers(key) if leader else []
            leads, *is_counted = (
                bool(each) and (each.sizes, each.gathers_kv) == (sizes, gathers_kv) for each in (leader, *followers)
            )
            keeps_values = leads and not any(is_counted)
            self._states[key, branch] = self._new_state(layer, transformer, sizes, gathers_kv, keeps_values)
            self._num_branches = max(self._num_branches, branch + 1)
            self._states[key, branch].first_step = self._states[key, branch].last_step = self.step
        state = self._states[key, branch]
        if state.last_step != self.step:
            state.previous_step, state.last_step = state.last_step, self.step
        if state.batched_branches != batched_branches:  # references of one branch would fit the values of another
            state.link_states.clear()
            state.ring_link_states.clear()
            state.first_step = self.step
            state.batched_branches = batched_branches
        if not state.is_exact:
            return state
        sent_bytes = sizes.slow_axis_bytes(*self._coordinates(gathers_lossless))
        state.stats.sent_bytes = state.stats.exact_bytes = sent_bytes
        return None

    def _codecs_of(self, state: LayerState, partition: AxisPartition | None, link_states: dict) -> LayerCodecs:
        """Return a layer's codecs at this step for given link states, as if there were no other branch."""
        keyframe_codec, is_keyframe = self.schedule.keyframe_codec, self.schedule.is_keyframe_step(self.step)
        codecs = self.schedule.codecs(self.step, self.total, None if is_keyframe or self._recovers else self._bits)
        if not self._predicts:
            codecs = {name: replace(codec, predicts=False) for name, codec in codecs.items()}
            keyframe_codec = replace(keyframe_codec, predicts=False)
        if self._recovers:
            # The change of a reference that is not finite is not finite either: keep no previous reference.
            codecs = dict.fromkeys(codecs, EXACT)
        elif not state.has_references:
            codecs = dict.fromkeys(codecs, keyframe_codec)
        return LayerCodecs(
            partition,
            codecs,
            link_states,
            state.stats,
            step=self.step,
            exact_references=self.schedule.cached is not None,
            keyframe_codec=keyframe_codec,
            single_stage=state.single_stage,
            gathers_kv=state.gathers_kv,
            joint=self.schedule.joint if state.has_references else 0.0,
            keeps_references=state.has_references,
            measures_yardsticks=not self.yardsticks and self.step == self._first_step,
            is_keyframe=self._recovers or is_keyframe,
        )

    @property
    def _bits(self) -> float | None:
        """Bits per value of residuals at this step; None to send values unquantized."""
        if self.fixed_bits:
            return self.fixed_bits[self.step]
        return self._rate.bits(self.step) if self._rate else self.schedule.bits

    @property
    def _checks_after_step(self) -> bool:
        """Whether values that are not finite are detected at the end of a step only, as on accelerators."""
        partition = self._partition or self._ring_partition
        return partition is not None and devices.capabilities(partition.slow.comm_stream.device.type).is_asynchronous

    @property
    def _num_slow(self) -> int:
        """Number of coordinates on the slow axes of the Ulysses group."""
        is_real = self.virtual_ranks is None or self.virtual_ranks.is_ring
        layout = self._partition if is_real else self.virtual_ranks
        return layout.num_slow if layout else 1

    @property
    def _ring_num_slow(self) -> int:
        """Number of coordinates on the slow axes of the ring."""
        is_virtual = self.virtual_ranks and self.virtual_ranks.is_ring
        layout = self.virtual_ranks if is_virtual else self._ring_partition
        return layout.num_slow if layout else 1

    def _coordinates(self, gathers_kv: bool) -> tuple[int, int]:
        """Return the coordinates on slow axes of a layer's all-to-alls, and on those along which it gathers K and V."""
        return (1, self._num_slow) if gathers_kv else (self._num_slow, self._ring_num_slow)

    def _new_state(
        self,
        layer: str,
        transformer: Hashable,
        sizes: LayerSizes,
        gathers_kv: bool,
        keeps_values: bool,
    ) -> LayerState:
        """Return the state of a layer that a branch calls for the first time in this run."""
        self.has_coded_layers = True
        if transformer not in self._transformers:
            self._drop_finished_transformers()
            self._transformers.add(transformer)
        if not self._states:
            self._budget = self._agree_on_budget(transformer, sizes)
            self._predicts = bool(self.schedule.predictor)
        planned_bytes = ReferenceBytes.of(sizes, self.schedule, *self._coordinates(gathers_kv), keeps_values)
        saved, added = coding_seconds = self._coding_seconds(sizes, gathers_kv)
        is_exact = self.schedule.is_lossless_layer(layer) or saved < added
        has_references = not is_exact
        if has_references and not self._fits_budget(planned_bytes):
            self._predicts = False
            for link_state in self._link_states:  # they took the memory of previous references
                link_state.drop_kept()
            has_references = self._fits_budget(planned_bytes)
        # V-Major has no keyframes in few bits.
        is_exact = is_exact or (not has_references and self.schedule.keyframe_codec.is_exact)
        return LayerState(
            layer,
            transformer,
            sizes,
            planned_bytes,
            is_exact,
            self._takes_single_stage(sizes),
            has_references,
            gathers_kv,
            coding_seconds,
        )

    def _takes_single_stage(self, sizes: LayerSizes) -> bool:
        """Return whether all-to-alls of a layer take one stage."""
        message_bytes = sizes.num_values // _MESSAGES_PER_LAYER * sizes.value_bytes
        return self._partition is not None and self._partition.is_single_stage(message_bytes)

    def _coding_seconds(self, sizes: LayerSizes, gathers_kv: bool) -> tuple[float, float]:
        """Return the link time that coding a layer saves and the host time that it adds, over Ulysses group and ring.

        Both are 0 where the slow axes were not measured. A lossless layer would send by heads, also if it gathers K and
        V here.
        """
        parts = [
            (self._partition, (self._num_slow, 1), _GATHERED_TENSORS if gathers_kv else _TENSORS),
            (self._ring_partition, (1, self._ring_num_slow), _GATHERED_TENSORS),
        ]
        saved = added = 0.0
        for partition, coordinates, num_tensors in parts:
            if partition and partition.coding_cost:
                saved += partition.coding_cost.saved_link_seconds(sizes.slow_axis_bytes(*coordinates))
                added += partition.coding_cost.added_host_seconds(num_tensors)
        return saved, added

    def _fits_budget(self, planned_bytes: ReferenceBytes) -> bool:
        """Return whether the references of another layer fit the memory budget."""
        return self.planned_reference_bytes + self._reference_bytes(planned_bytes) <= self._budget

    def _agree_on_budget(self, transformer: Hashable, sizes: LayerSizes) -> float:
        """Return the memory budget of a run whose first layer asks, the smallest one of all ranks.

        All ranks that share a device have allocated their inputs when the last of them reads its memory.
        """
        if self._given_budget is not None or self._device_memory is None:
            return math.inf if self._given_budget is None else self._given_budget
        memory = self._device_memory()
        budget = reference_memory.default_budget(memory, sizes, self.total is not None) if memory else math.inf
        key = transformer, sizes, self.total
        kept = self._default_budgets.setdefault(key, budget)
        if budget < kept - _DRIFT:
            self._default_budgets[key] = kept = budget
        return max(0.0, *self._min_over_ranks([kept]))

    def _drop_finished_transformers(self) -> None:
        """Drop references of transformers without a call at this step, when another transformer is first called.

        They have done their part of the run; one that is called again begins with a keyframe. All ranks make the same
        calls.
        """
        self.reporter.expect_layers()
        current = {state.transformer for state in self._states.values() if state.last_step == self.step}
        for key, state in list(self._states.items()):
            if state.transformer not in current:
                del self._states[key]

    @property
    def planned_reference_bytes(self) -> int:
        """Memory that references take once all previous references are there too, in bytes."""
        states = [state for state in self._states.values() if state.has_references]
        return sum(self._reference_bytes(state.planned_bytes) for state in states)

    def _reference_bytes(self, planned: ReferenceBytes) -> int:
        """Return the memory of a layer's references in this run."""
        return planned.predicted if self._predicts else planned.single

    @property
    def reference_bytes(self) -> int:
        """Memory that references take now, in bytes."""
        return sum(link_state.nbytes for link_state in self._link_states)

    @property
    def _link_states(self) -> list[LinkState]:
        """All link states, in the same order on every rank."""
        return [
            link_state
            for state in self._states.values()
            for link_states in (state.link_states, state.ring_link_states)
            for link_state in link_states.values()
        ]
