"""Log messages of a session's runs, at the ends of steps and of runs."""

from collections.abc import Callable, Iterable

from xfuser_cocodiff.engine.compression.axis_partition import AxisLayout
from xfuser_cocodiff.engine.compression.modes import PRESETS, CodecSchedule
from xfuser_cocodiff.engine.compression.reference_store import ReferenceStore
from xfuser_cocodiff.engine.compression.run_reporter import RunReporter
from xfuser_cocodiff.engine.compression.step_report import RunErrors, StepReport
from xfuser_cocodiff.xdit.session import run_messages


class LoggingReporter(RunReporter):
    """Logs memory and the schedule once each, and the error of every run.

    Args:
        mode: mode of the runs.
        overrides: changes to its schedule, in its notation.
        partitions: slow and fast axes of the Ulysses group and of the ring; None where one has no slow axis.
        info: logs what is normal.
        warn: logs what a user should act on.
    """

    def __init__(
        self,
        mode: str,
        overrides: str | None,
        partitions: Iterable[AxisLayout | None],
        info: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        self._mode, self._overrides = mode, overrides
        self._schedule = CodecSchedule.parse(overrides, PRESETS[mode]) if overrides else PRESETS[mode]
        self._slow_axes = [name for each in partitions if each for name in each.slow_axis_names]
        self.info, self.warn = info, warn
        self._logged: set[str] = set()
        """Messages that are not logged again."""
        self._logged_states = 0
        """Number of layer states that the messages have covered."""

    def expect_layers(self) -> None:
        """Log messages about layers again if they differ: a run begins, or continues with another transformer."""
        self._logged_states = 0

    def log_step(self, report: StepReport, store: ReferenceStore, total: int | None) -> None:
        """Log messages about layers that are new, and the schedule once a layer was coded by it."""
        if len(store.states) > self._logged_states:
            self._log_layers(store)
            self._logged_states = len(store.states)
        if not report.was_keyframe and report.sent_bytes and report.exact_layers < len(store.states):
            self._log_once(run_messages.mode_in_use(self._mode, self._overrides, self._schedule, total))

    def log_errors(self, errors: RunErrors, first_step: int, of_all_ranks: bool, has_yardsticks: bool) -> None:
        """Log the errors of a run, if it had any, however often; see :func:`run_messages.error_of_run`."""
        if message := run_messages.error_of_run(errors, first_step, of_all_ranks, has_yardsticks):
            self.info(message)

    def _log_layers(self, store: ReferenceStore) -> None:
        """Log which layers are lossless, and why, and the memory of the references of others."""
        states = list(store.states.values())
        self._log_once(run_messages.uncoded(states, self._slow_axes))
        num_layers, num_branches = len({key for key, _ in store.states}), 1 + max(branch for _, branch in store.states)
        coded = [state for state in states if state.saves_time]
        budget = run_messages.memory_budget(coded, store.budget, store.has_default_budget)
        memory = run_messages.reference_memory(coded, num_layers, num_branches, store.predicts, budget)
        if memory and not all(state.has_references for state in coded):
            self.warn(memory)  # in every run
        else:
            self._log_once(memory)

    def _log_once(self, message: str | None) -> None:
        """Log a message, if there is one, unless it was logged before."""
        if message and message not in self._logged:
            self._logged.add(message)
            self.info(message)
