"""Runs, steps and guidance branches, and the link references that belong to them.

References live from the first step of a run to its last, for one layer in one branch of classifier-free guidance. No
run reads those of another: a run begins without any, however the one before it ended. If a run continues with another
transformer, the references of the one before it are dropped.
"""

import math
from collections.abc import Callable, Hashable
from dataclasses import replace

from xfuser_cocodiff.engine.compression import expected_quality, modes, precisions, reference_memory, run_messages
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.codec import EXACT
from xfuser_cocodiff.engine.compression.error_readout import ErrorReadout
from xfuser_cocodiff.engine.compression.layer_codecs import CodecStats, LayerCodecs, LinkState
from xfuser_cocodiff.engine.compression.layer_state import LayerState
from xfuser_cocodiff.engine.compression.modes import CodecSchedule
from xfuser_cocodiff.engine.compression.precisions import KindLoad, LayerKind, StepLoad
from xfuser_cocodiff.engine.compression.reference_memory import GIB, LayerSizes, ReferenceBytes
from xfuser_cocodiff.engine.compression.step_report import StartedReport, StepReport
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
        max_over_ranks: returns the maximum over all ranks for each of some numbers.
        virtual_ranks: ranks to simulate instead of communication.
        memory_budget: bytes that link references may take on each rank; None for the default.
        info: logs what is normal.
        warn: logs what a user should act on.
        ring_partition: slow and fast axes of the ring; None if it has no slow axis.
        precision_of: returns the precision of a kind of layer at this step, the same on all ranks; it changes between
            steps only.
        is_guided: whether the branches of guidance are on different ranks, so that runs are guided with one branch.
        device_memory: reads the memory of this rank's device, for the default budget; None for no limit by default,
            the same on all ranks.
    """

    def __init__(
        self,
        partition: AxisPartition | None,
        mode: str,
        overrides: str | None,
        max_over_ranks: Callable[[list[float]], list[float]],
        virtual_ranks: VirtualRanks | None = None,
        memory_budget: int | None = None,
        info: Callable[[str], None] = lambda message: None,
        warn: Callable[[str], None] = lambda message: None,
        ring_partition: AxisPartition | None = None,
        precision_of: Callable[[LayerKind], float] = lambda kind: precisions.SCHEDULED,
        is_guided: bool = False,
        device_memory: Callable[[], DeviceMemory | None] | None = None,
    ) -> None:
        self._has_apart_branches = is_guided
        """Whether the branches of guidance are on different ranks, where each is coded by itself."""
        self.precision_of = precision_of
        self.virtual_ranks = virtual_ranks
        self._given_budget, self._device_memory, self._info, self._warn = memory_budget, device_memory, info, warn
        self._default_budgets: dict[Hashable, float] = {}
        """Default budgets of this rank, by the runs that have had them."""
        self._budget = math.inf
        """Bytes that link references of this run may take, the same on all ranks."""
        self._partition, self._ring_partition, self.mode, self._overrides = partition, ring_partition, mode, overrides
        self._max_over_ranks = max_over_ranks
        self._int8_references = False
        """Whether references of this run are stored in int8."""
        self._logged: set[str] = set()
        """Messages that are not logged again."""
        self._logged_states = 0
        """Number of layer states that the messages have covered."""
        self._transformers: set[Hashable] = set()
        """Transformers that this run has called."""
        self._states: dict[tuple[Hashable, int], LayerState] = {}
        """Layer states by layer and branch."""
        self.has_coded_layers = False
        """Whether a layer of this run has asked for codecs."""
        self.inactive_reason: str | None = None
        """Why compression is inactive for a layer of this run."""
        self.is_running = False
        """Whether a run is in progress."""
        self._forces_keyframe = False
        """Whether the current step is lossless regardless of the schedule, since values were not finite before it."""
        self._is_certain = True
        """Whether the run was announced rather than inferred."""
        self._has_branches = False
        """Whether layers have had several branches of guidance in a step of this run."""
        self._may_have_branches = False
        """Whether batches of this step may have several branches of guidance."""
        self._is_guided = is_guided
        """Whether the schedule is that of runs with guidance."""
        self.schedule = self._schedule_for(None)
        """Codec schedule of the run."""
        self._precisions = precisions.precisions_of(self.schedule, None)
        """Precisions of the run, lowest first."""
        self.step = self._first_step = 0
        """Current step, from 0, and that at which the run began."""
        self.total: int | None = None
        """Number of steps; None if unknown."""
        self._started: list[StartedReport] = []
        """Reports of the run's steps so far."""
        self.load: StepLoad | None = None
        """What the last step sent, until it is taken."""

    def _schedule_for(self, total: int | None) -> CodecSchedule:
        """Return the schedule of a run of `total` steps."""
        preset = modes.preset(self.mode, total, self._is_guided) or CodecSchedule()
        return CodecSchedule.parse(self._overrides, preset) if self._overrides else preset

    def begin_run(self, total: int | None, step: int = 0, is_certain: bool = True) -> None:
        """Begin a run, without references.

        Args:
            total: number of steps; None if unknown.
            step: step at which the run continues after another one interrupted it.
            is_certain: whether the run was announced rather than inferred; keyframes of an inferred run are lossless.
        """
        self.end_run()
        self.is_running, self._logged_states = True, 0
        self._forces_keyframe = False
        self.inactive_reason, self.has_coded_layers = None, False
        self._has_branches = self._may_have_branches = False
        self._is_guided = self._has_apart_branches
        self.schedule, self._is_certain = self._schedule_for(total), is_certain
        self._precisions = precisions.precisions_of(self.schedule, total)
        self.step, self._first_step, self.total = step, step, total
        self._transformers.clear()
        self._int8_references, self._started = False, []

    def end_run(self) -> None:
        """End the run, or abort it, and drop its references."""
        self.is_running = False
        self._states.clear()

    def disable(self, reason: str) -> None:
        """Note that a layer of this run is unsupported and stays lossless."""
        self.inactive_reason = reason

    def end_step(self) -> None:
        """End a step: report it, and make the next one a keyframe if values of any rank were not finite.

        On accelerators the step before decides, whose errors have arrived by now: for those of this step the host would
        wait, and the device would then wait for the host.
        """
        if not self.is_running:
            return
        started = self._start_report()
        self._started.append(started)
        self._log(started.report)
        if not self._checks_after_step:
            started.read()
        elif len(self._started) > 1:
            self._decide_on_keyframe(self._started[-2].read())
        self._update_schedule()
        if self._may_have_branches and not self._is_guided:  # these kinds never run again if it has
            self.load = None
        self._may_have_branches = False
        self.step += 1
        if self.step == self.total:
            self.end_run()

    def _update_schedule(self) -> None:
        """Take the schedule of runs with guidance from the next step on, if the run has had several branches.

        The order of calls and :meth:`note_branches` tell, which are equal on all ranks.
        """
        if self._is_guided or not self._has_branches:
            return
        self._is_guided = True
        self.schedule = self._schedule_for(self.total)
        self._precisions = precisions.precisions_of(self.schedule, self.total)
        for state in self._states.values():
            state.kind = self._at_schedule(state.kind)
        if self.load:
            # Kinds of the schedule before never run again in this run, and must not wait for a choice.
            kinds = {self._at_schedule(kind): load for kind, load in self.load.kinds.items()}
            self.load = StepLoad(kinds, is_representative=False)

    def _at_schedule(self, kind: LayerKind) -> LayerKind:
        """Return a kind of layer at the schedule of the run."""
        return kind._replace(schedule=str(self.schedule), precisions=self._precisions)

    def note_branches(self) -> None:
        """Note that batches have several branches of guidance, which holds from this step on if it has no call yet."""
        self._has_branches = True
        if all(state.last_step != self.step for state in self._states.values()):
            self._update_schedule()

    def _decide_on_keyframe(self, report: StepReport) -> None:
        """Decide whether the next step is lossless, by the report of the step before the current one on all ranks.

        It is not if the current step was: that has already replaced wrong references.
        """
        [not_finite] = self._max_over_ranks([float(report.not_finite)])
        self._forces_keyframe = not_finite > 0 and not self._forces_keyframe

    @property
    def reports(self) -> list[StepReport]:
        """Reports of the run's steps so far. On accelerators the host waits for the last step's errors."""
        return [each.read() for each in self._started]

    def _start_report(self) -> StartedReport:
        """Start the report of the current step, and reset the statistics."""
        states = list(self._states.values())
        stats = [state.stats for state in states]
        was_keyframe = self._forces_keyframe or self.schedule.is_keyframe_step(self.step)
        has_new_layers = any(state.first_step == self.step and not state.is_exact for state in states)
        self.load = StepLoad(self._load_of_kinds(), not (was_keyframe or has_new_layers))
        for state in states:
            state.stats = CodecStats()
        report = StepReport(
            self.step,
            {},
            sum(each.sent_bytes for each in stats),
            sum(each.exact_bytes for each in stats),
            sum(each.repeated for each in stats),
            0,
            was_keyframe,
            self.reference_bytes,
            sum(state.is_exact for state in self._states.values()),
            tuple(dict.fromkeys(each.layer for each in self._states.values() if each.gathers_kv and not each.is_exact)),
        )
        errors = [error for each in stats for error in each.quant_errors]
        num_errors = [(state.layer, len(each.quant_errors)) for state, each in zip(states, stats, strict=True)]
        return StartedReport(report, num_errors, not self._checks_after_step, ErrorReadout(errors))

    def _load_of_kinds(self) -> dict[LayerKind, KindLoad]:
        """Return what the coded layers that ran at this step have sent, by kind."""
        loads: dict[LayerKind, KindLoad] = {}
        for state in self._states.values():
            if state.last_step == self.step and not state.is_exact:
                load = loads.setdefault(state.kind, KindLoad())
                load.calls += 1
                load.sent_bytes += state.stats.sent_bytes
                load.exact_bytes += state.stats.exact_bytes
        return loads

    def take_load(self) -> StepLoad | None:
        """Return what the last step sent, once; None where no step has been encoded since."""
        load, self.load = self.load, None
        return load

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
        in_ring = self._partition is None and self.virtual_ranks.is_ring
        leader, keeps_values = self._leader_of(state, key, branch), self._is_followed(key, branch, in_ring)
        token_blocks = layout.num_fast if state.gathers_kv else 1
        return replace(
            self._codecs_of(state, self._partition, state.link_states),
            leader=leader.link_states if leader else None,
            token_blocks=None if in_ring else token_blocks,
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
        leader, keeps_values = self._leader_of(state, key, branch), self._is_followed(key, branch, in_ring=True)
        return replace(
            self._codecs_of(state, self._ring_partition, state.ring_link_states),
            leader=leader.ring_link_states if leader else None,
            token_blocks=None,
            keeps_values=keeps_values,
            batched_branches=batched_branches,
        )

    def _leader_of(self, state: LayerState, key: Hashable, branch: int) -> LayerState | None:
        """Return a layer's state in the branch that leads another one; None where each is coded by itself."""
        leader = self._states.get((key, 0)) if branch and self.schedule.joint else None
        of_both = {(each.is_exact, each.single_stage, each.gathers_kv) for each in (state, leader) if each}
        return leader if len(of_both) == 1 else None

    def _is_followed(self, key: Hashable, branch: int, in_ring: bool = False) -> bool:
        """Return whether a layer's values are kept for other branches.

        Whether there are others is not known in the first step. If the schedule keeps previous references, there is
        memory then: no reference has one yet. In later steps, memory is planned with the first branch that follows, and
        that branch makes use of it if it is coded by the same exchange and was not left out of the last step, and in a
        ring only if its tensors have the same sizes.
        """
        if branch or not self.schedule.joint:
            return False
        if self.step == self._first_step:
            return bool(self.schedule.predictor)
        follower = self._states.get((key, 1))
        if follower is None or follower.is_exact or follower.last_step < self.step - 1:
            return False
        leader = self._leader_of(follower, key, 1)
        return leader is not None and (not in_ring or leader.sizes == follower.sizes)

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
        self._has_branches |= branch > 0
        if not self.is_running:
            return None
        if (key, branch) not in self._states:
            leader = self._states.get((key, 0)) if branch and self.schedule.joint else None
            if leader and leader.gathers_kv != gathers_kv:  # then each branch is coded by itself
                leader = None
            # The first branch that follows another counts the values that are kept for all.
            kept = self._kept_sizes(leader, sizes) if leader and branch == 1 else None
            self._states[key, branch] = self._new_state(layer, transformer, sizes, gathers_kv, leader, kept)
            self._states[key, branch].first_step = self.step
        state = self._states[key, branch]
        state.last_step = self.step
        self._may_have_branches |= batched_branches > 1
        if state.batched_branches != batched_branches:  # references of one branch would fit the values of another
            state.link_states.clear()
            state.ring_link_states.clear()
            state.batched_branches = batched_branches
        if not state.is_exact:
            return state
        sent_bytes = sizes.slow_axis_bytes(*self._coordinates(gathers_lossless))
        state.stats.sent_bytes = state.stats.exact_bytes = sent_bytes
        return None

    def _codecs_of(self, state: LayerState, partition: AxisPartition | None, link_states: dict) -> LayerCodecs:
        """Return a layer's codecs at this step for given link states, as if there were no other branch."""
        codecs = self.schedule.codecs(self.step, self.total, state.layer)
        precision = self.precision_of(state.kind)
        codecs = {name: precisions.at_precision(codec, precision) for name, codec in codecs.items()}
        keyframe_codec = precisions.at_precision(self.schedule.keyframe_codec, precision)
        if not self._is_certain:
            keyframe_codec = replace(EXACT, predictor=self.schedule.predictor)
        if self._forces_keyframe:
            # The change of a reference that is not finite is not finite either: keep no previous reference then.
            codecs = dict.fromkeys(codecs, EXACT)
        else:
            codecs = {name: keyframe_codec if codec.is_keyframe else codec for name, codec in codecs.items()}
        return LayerCodecs(
            partition,
            codecs,
            link_states,
            state.stats,
            step=self.step,
            int8_references=self._int8_references,
            keyframe_codec=keyframe_codec,
            single_stage=state.single_stage,
            gathers_kv=state.gathers_kv,
            joint=self.schedule.joint,
            is_keyframe=self._forces_keyframe or self.schedule.is_keyframe_step(self.step),
        )

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
        leader: LayerState | None,
        kept: LayerSizes | None,
    ) -> LayerState:
        """Return the state of a layer that a branch calls for the first time in this run.

        It takes the leading branch's choices that depend on sizes. Prompts differ in length, and two branches on both
        sides of a threshold could not be coded together.
        """
        self.has_coded_layers = True
        if self.schedule.allocation:
            self.schedule.allocation.check_layer(layer)
        if transformer not in self._transformers:
            self._drop_finished_transformers()
            self._transformers.add(transformer)
        if not self._states:
            self._budget = self._agree_on_budget(transformer, sizes)
        planned_bytes = ReferenceBytes.of(sizes, self.schedule, *self._coordinates(gathers_kv), kept)
        saved, added = coding_seconds = leader.coding_seconds if leader else self._coding_seconds(sizes, gathers_kv)
        is_exact = self.schedule.is_lossless_layer(layer) or saved < added
        if not is_exact and not self._fits_budget(planned_bytes):
            self._convert_to_int8()
            is_exact = not self._fits_budget(planned_bytes)
        single_stage = leader.single_stage if leader else self._takes_single_stage(sizes)
        own_kind = LayerKind(precisions.kind_name(layer), sizes, gathers_kv, str(self.schedule), self._precisions)
        return LayerState(
            layer,
            transformer,
            sizes,
            leader.kind if leader else own_kind,
            planned_bytes,
            is_exact,
            single_stage,
            gathers_kv,
            coding_seconds,
        )

    def _kept_sizes(self, leader: LayerState, following: LayerSizes) -> LayerSizes:
        """Return the sizes of what a leading branch keeps for another one, of these sizes."""
        in_ring = not leader.gathers_kv and self._ring_num_slow > 1
        return leader.sizes._replace(num_v_values=0) if in_ring and leader.sizes != following else leader.sizes

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
        return self.planned_reference_bytes + planned_bytes[self._int8_references] <= self._budget

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
        return max(0.0, -self._max_over_ranks([-kept])[0])

    def _drop_finished_transformers(self) -> None:
        """Drop references of transformers without a call at this step, when another transformer is first called.

        They have done their part of the run; one that is called again begins with a keyframe. All ranks make the same
        calls.
        """
        self._logged_states = 0
        current = {state.transformer for state in self._states.values() if state.last_step == self.step}
        for key, state in list(self._states.items()):
            if state.transformer not in current:
                del self._states[key]

    def _convert_to_int8(self) -> None:
        """Store all references in int8 from now on."""
        if self._int8_references:
            return
        self._int8_references = True
        for state in self._states.values():
            on_stream = self._partition and self._partition.fast and not state.single_stage
            resharded, gathered = state.link_states, state.ring_link_states
            if state.gathers_kv:
                resharded, gathered = {}, state.link_states
            for link_state in resharded.values():
                link_state.to_int8(self._partition.fast.comm_stream if on_stream else None)
            for link_state in gathered.values():  # both of whose references are used on the comm stream
                partition = self._partition or self._ring_partition
                if partition is None:  # virtual ranks
                    link_state.to_int8()
                else:
                    partition.slow.comm_stream.start("convert references to int8", link_state.to_int8).wait()

    # Log messages at the end of a step.

    def _log(self, report: StepReport) -> None:
        """Log memory, unmatched layer names and the schedule, each unless it was logged before."""
        lossy = [state for state in self._states.values() if not self.schedule.is_lossless_layer(state.layer)]
        if len(self._states) > self._logged_states:
            self._log_layers(lossy)
            self._logged_states = len(self._states)
        if not report.was_keyframe and report.sent_bytes and report.exact_layers < len(self._states):
            expected = self._expected_quality(any(state.gathers_kv for state in lossy))
            self._log_once(
                self._info,
                run_messages.mode_in_use(self.mode, self._overrides, self.schedule, self.total, expected),
            )

    def _log_layers(self, lossy: list[LayerState]) -> None:
        """Log which layers are lossless against the schedule, and why, and the memory of the references of others."""
        axes = (name for part in (self._partition, self._ring_partition) if part for name in part.slow_axis_names)
        self._log_once(self._info, run_messages.uncoded(lossy, axes))
        num_layers, num_branches = len({key for key, _ in self._states}), 1 + max(each for _, each in self._states)
        coded, is_default = [state for state in lossy if state.saves_time], self._given_budget is None
        budget = run_messages.memory_budget(coded, self._budget, is_default)
        memory = run_messages.reference_memory(coded, num_layers, num_branches, self._int8_references, budget)
        if memory and any(state.is_exact for state in coded):
            self._warn(memory)  # in every run
        else:
            self._log_once(self._info, memory)
        for warning in run_messages.unmatched_layers(self.schedule, (state.layer for state in self._states.values())):
            self._log_once(self._warn, warning)

    def _expected_quality(self, gathers_kv: bool) -> str:
        """Return the PSNR that runs like this one have with small trained models, in words; empty if unknown."""
        expected = expected_quality.expected_psnr(self.mode, self.total, self._is_guided, gathers_kv)
        if not expected or self._overrides or self._has_apart_branches:
            return ""
        guidance = "with guidance" if self._is_guided else "without guidance"
        return f"PSNR {guidance}: {expected_quality.describe(expected)}"

    def _log_once(self, log: Callable[[str], None], message: str | None) -> None:
        """Log a message, if there is one, unless it was logged before."""
        if message and message not in self._logged:
            self._logged.add(message)
            log(message)

    @property
    def planned_reference_bytes(self) -> int:
        """Memory that references take once all previous references are there too, in bytes."""
        return sum(state.planned_bytes[self._int8_references] for state in self._states.values() if not state.is_exact)

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
