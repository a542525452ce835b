"""Runs and their steps: the codecs of each layer at each step, and what a step's errors decide for later ones."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from xfuser_cocodiff.engine.codec.codec import EXACT
from xfuser_cocodiff.engine.compression import modes
from xfuser_cocodiff.engine.compression.axis_partition import AxisLayout, AxisPartition
from xfuser_cocodiff.engine.compression.layer_codecs import CodecStats, LayerCodecs
from xfuser_cocodiff.engine.compression.layer_state import CodedCall, LayerState
from xfuser_cocodiff.engine.compression.rate_control import RateControl
from xfuser_cocodiff.engine.compression.reference_store import ReferenceStore
from xfuser_cocodiff.engine.compression.run_clock import RunClock
from xfuser_cocodiff.engine.compression.run_reporter import RunReporter
from xfuser_cocodiff.engine.compression.send_buffer import SendBuffer
from xfuser_cocodiff.engine.compression.step_codecs import StepCodecs
from xfuser_cocodiff.engine.compression.step_errors import StepErrors
from xfuser_cocodiff.engine.compression.step_report import RunErrors, StartedReport, StepReport
from xfuser_cocodiff.engine.topology.device_memory import DeviceMemory


class CodecRuntime:
    """Codecs of the current run. All ranks must call its methods in the same order.

    Args:
        partition: slow and fast axes of the Ulysses group; None if it has no slow axis.
        mode: a lossy mode, one of options.MODES.
        overrides: changes to the mode's schedule, in its notation.
        sum_over_ranks: returns the sum over all ranks that share the sequence for each of some numbers.
        memory_budget: bytes that link references may take on each rank; None for the default.
        reporter: reports the runs to the user; None to report nothing.
        ring_partition: slow and fast axes of the ring; None if it has no slow axis.
        device_memory: reads the memory of this rank's device, see :class:`ReferenceStore`.
        min_over_ranks: returns the minimum over all ranks for each of some numbers; of one rank if not given.
    """

    def __init__(
        self,
        partition: AxisLayout | None,
        mode: str,
        overrides: str | None,
        sum_over_ranks: Callable[[list[float]], list[float]],
        memory_budget: int | None = None,
        reporter: RunReporter | None = None,
        ring_partition: AxisLayout | None = None,
        device_memory: Callable[[], DeviceMemory | None] | None = None,
        min_over_ranks: Callable[[list[float]], list[float]] = list,
    ) -> None:
        self._partition, self._ring_partition, self.mode = partition, ring_partition, mode
        self._sum_over_ranks = sum_over_ranks
        self.inactive_reason: str | None = None
        """Why compression is inactive for a layer of this run."""
        self.schedule = modes.schedule_of(mode, overrides)
        """Codec schedule of all runs."""
        self.clock = RunClock()
        """Clock of the run in progress."""
        layouts = partition, ring_partition
        self.store = ReferenceStore(self.schedule, self.clock, *layouts, memory_budget, device_memory, min_over_ranks)
        """Link references of the run in progress."""
        partitions = [each for each in layouts if each]
        self.reporter = reporter or RunReporter()
        self._checks_after_step = any(each.is_asynchronous for each in partitions)
        """Whether values that are not finite are detected at the end of a step only, as on accelerators."""
        self._recovers = False
        """Whether the current step is lossless regardless of the schedule; whether values were not finite before it."""
        self.has_coded_layers = False
        """Whether a layer of this run has asked for codecs."""
        self.yardsticks: dict[str, float] = {}
        """Mean errors of FP8 and FP4 on this rank's tensors of the first run's first step."""
        self.value_bytes = 0
        """Bytes of a value without codecs, in the last step."""
        self.fixed_bits: Sequence[float] | None = None
        """Bits per value of each step, in place of what rate control would choose; for runs without values."""
        self._rate: RateControl | None = None
        """Choice of the run's bits; None where the schedule has them."""
        self._step_codecs: dict[tuple[int, bool, bool], StepCodecs] = {}
        """Codecs of each step, by whether a layer has references, and whether these are extrapolated."""
        self._errors, self._send_buffer = StepErrors(), SendBuffer()
        self._started: list[StartedReport] = []
        """Reports of the run's steps so far."""

    @property
    def is_running(self) -> bool:
        """Whether a run is in progress."""
        return self.clock.is_running

    def begin_run(self, total: int | None, step: int = 0) -> None:
        """Begin a run, without references.

        Args:
            total: number of steps; None if unknown.
            step: step at which the run continues after another one interrupted it.
        """
        self.end_run()
        self.reporter.expect_layers()
        self.clock.begin(total, step)
        self.store.begin_run()
        self._recovers, self.inactive_reason, self.has_coded_layers = False, None, False
        self._rate = RateControl(self.schedule.error) if self.schedule.error else None
        self._step_codecs.clear()
        self._errors.start_readout()  # of a step that was aborted
        self._started = []

    def end_run(self, is_complete: bool = False) -> None:
        """End the run, or abort it, and drop its references.

        Args:
            is_complete: whether it was not aborted. Its errors are then logged: those of all ranks after the last step,
                which every rank reaches; else those of this rank, since others might not call the collective.
        """
        was_running, self.clock.is_running = self.is_running, False
        self.store.states.clear()
        self._send_buffer = SendBuffer()
        if not (was_running and is_complete):
            return
        # The host may wait for the last errors: no step is left whose launches would be late.
        reports, is_last = self.reports, self.clock.is_over
        sum_over_ranks = self._sum_over_ranks if is_last else list
        errors = RunErrors.of(reports, self.yardsticks, self.value_bytes, sum_over_ranks)
        has_yardsticks = any(each.yardstick_errors for each in reports)
        self.reporter.log_errors(errors, self.clock.first_step, is_last, has_yardsticks)

    def end_step(self) -> None:
        """End a step: report it, and let its errors decide on later ones.

        On accelerators the step before decides, whose errors have arrived by now: for those of this step the host would
        wait, and the device would then wait for the host.
        """
        if not self.is_running:
            return
        self.value_bytes = max((state.sizes.value_bytes for state in self.store.states.values()), default=0)
        started = self._start_report()
        self._started.append(started)
        self.reporter.log_step(started.report, self.store, self.clock.total)
        if not self._checks_after_step:
            self._use_errors(self._read(started))
        elif len(self._started) > 1:
            self._use_errors(self._read(self._started[-2]))
        self.clock.step += 1
        if self.clock.is_over:
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
        states = list(self.store.states.values())
        stats = [*(state.stats for state in states), *self.store.dropped_stats]
        self.store.dropped_stats.clear()
        report = StepReport(
            self.clock.step,
            dict.fromkeys((state.layer for state in states), 0.0),
            bits=None if self._is_keyframe else self._bits,
            sent_bytes=sum(each.sent_bytes for each in stats),
            exact_bytes=sum(each.exact_bytes for each in stats),
            repeated=sum(each.repeated for each in stats),
            was_keyframe=self._is_keyframe,
            reference_bytes=self.store.nbytes,
            exact_layers=sum(state.is_exact for state in states),
            gathered_layers=tuple(
                dict.fromkeys(each.layer for each in states if each.gathers_kv and not each.is_exact)
            ),
        )
        for state in states:
            state.stats = CodecStats()
        return StartedReport(report, not self._checks_after_step, self._errors.start_readout())

    def layer_codecs(self, call: CodedCall) -> LayerCodecs | None:
        """Return the codecs of a layer's Ulysses group at this step, or None if it is lossless.

        Args:
            call: the call of the layer.
        """
        state = self._coded_state(call)
        return self._codecs_of(state, call, self._partition) if state else None

    def ring_codecs(self, call: CodedCall) -> LayerCodecs | None:
        """Return the codecs of a layer's K and V in the ring at this step; see :meth:`layer_codecs`."""
        state = self._coded_state(call)
        return self._codecs_of(state, call, self._ring_partition, is_ring=True) if state else None

    def _coded_state(self, call: CodedCall) -> LayerState | None:
        """Return the state of a layer that is called; None outside of runs and for lossless layers."""
        if not self.is_running:
            return None
        self.has_coded_layers = True
        if self.store.is_new(call.transformer):
            self.reporter.expect_layers()
        state = self.store.state_of(call)
        if not state.is_exact:
            return state
        sent_bytes = call.sizes.slow_axis_bytes(*self.store.coordinates(False))
        state.stats.sent_bytes = state.stats.exact_bytes = sent_bytes
        return None

    def _codecs_of(
        self, state: LayerState, call: CodedCall, partition: AxisLayout | None, is_ring: bool = False
    ) -> LayerCodecs | None:
        """Return a layer's codecs at this step; None if the partition has no slow axis."""
        if partition is None:
            return None
        leader = self.store.leader_of(state, call.key, call.branch)
        return LayerCodecs(
            partition if isinstance(partition, AxisPartition) else None,
            self._codecs_of_step(state.has_references),
            state.links(is_ring),
            state.stats,
            self._errors,
            layer=state.layer,
            counts_errors=state.has_references and (self._is_keyframe or state.first_step < self.clock.step),
            gathers_kv=state.gathers_kv,
            leader=leader.links(is_ring) if leader else None,
            keeps_values=self.store.is_followed(call.key, call.branch),
            send_buffer=self._send_buffer,
        )

    def _codecs_of_step(self, has_references: bool) -> StepCodecs:
        """Return the codecs of this step, for layers with references or for those without."""
        key = self.clock.step, has_references, self.store.predicts
        if key not in self._step_codecs:
            self._step_codecs[key] = self._new_step_codecs(*key)
        return self._step_codecs[key]

    def _new_step_codecs(self, step: int, has_references: bool, predicts: bool) -> StepCodecs:
        schedule = self.schedule
        keyframe_codec = replace(schedule.keyframe_codec, predicts=predicts)
        codecs = schedule.codecs(step, self.clock.total, None if self._is_keyframe else self._bits)
        codecs = {name: replace(codec, predicts=codec.predicts and predicts) for name, codec in codecs.items()}
        if self._recovers:
            # The change of a reference that is not finite is not finite either: keep no previous reference.
            codecs = dict.fromkeys(codecs, EXACT)
        elif not has_references:
            codecs = dict.fromkeys(codecs, keyframe_codec)
        return StepCodecs(
            number=step,
            codecs=codecs,
            keyframe_codec=keyframe_codec,
            is_keyframe=self._is_keyframe,
            is_joint=bool(schedule.joint) and has_references,
            keeps_references=has_references,
            has_exact_references=schedule.cached is not None,
            measures_yardsticks=not self.yardsticks and self.clock.is_first_step,
        )

    @property
    def _is_keyframe(self) -> bool:
        """Whether this step uses no references of earlier steps."""
        return self._recovers or self.schedule.is_keyframe_step(self.clock.step)

    @property
    def _bits(self) -> float | None:
        """Bits per value of residuals at this step; None to send values unquantized."""
        if self.fixed_bits:
            return self.fixed_bits[self.clock.step]
        return self._rate.bits(self.clock.step) if self._rate else self.schedule.bits
