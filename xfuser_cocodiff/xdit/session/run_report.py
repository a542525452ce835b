"""Log messages of a session's runs: how layers are coded and the memory for it, once, and the error of every run."""

import math
from collections.abc import Iterable, Sequence

from xfuser_cocodiff.engine.compression import modes
from xfuser_cocodiff.engine.compression.axis_partition import AxisLayout
from xfuser_cocodiff.engine.compression.layer_state import LayerState
from xfuser_cocodiff.engine.compression.reference_memory import GIB
from xfuser_cocodiff.engine.compression.reference_store import ReferenceStore
from xfuser_cocodiff.engine.compression.run_reporter import RunReporter
from xfuser_cocodiff.engine.compression.step_report import RunErrors, StepReport
from xfuser_cocodiff.xdit.patching import log


class LoggingReporter(RunReporter):
    """Logs memory and the schedule once each, and the error of every run.

    Args:
        mode: mode of the runs.
        overrides: changes to its schedule, in its notation.
        partitions: slow and fast axes of the Ulysses group and of the ring; None where one has no slow axis.
    """

    def __init__(self, mode: str, overrides: str | None, partitions: Iterable[AxisLayout | None]) -> None:
        self._mode, self._schedule = f"{mode}@{overrides}" if overrides else mode, modes.schedule_of(mode, overrides)
        self._slow_axes = dict.fromkeys(name for each in partitions if each for name in each.slow_axis_names)
        self.info, self.warn = log.info_always, log.warn_always
        self._logged: set[str | None] = {None}
        """Messages that are not logged again."""
        self._logged_states = 0
        """Number of layer states that the messages have covered."""

    def expect_layers(self) -> None:
        """Log messages about layers again if they differ: a run begins, or continues with another transformer."""
        self._logged_states = 0

    def log_step(self, report: StepReport, store: ReferenceStore, total: int | None) -> None:
        """Log messages about layers that are new, and the schedule once a layer was coded by it."""
        if len(store.states) > self._logged_states:
            self._logged_states = len(store.states)
            self._log_layers(store)
        if not report.was_keyframe and report.sent_bytes and report.exact_layers < len(store.states):
            self._log_once(
                f"mode {self._mode!r}: {self._schedule}; measure this model with cocodiff quality --model NAME "
                f"--steps {total or 'N'} --modes {self._mode.replace(',', ';')!r}"
            )

    def log_errors(self, errors: RunErrors, first_step: int, of_all_ranks: bool, has_yardsticks: bool) -> None:
        """Log the errors of a run, if it had any, however often."""
        if errors.mean_error is None:
            return
        coverage = f" from step {first_step + 1} on" if first_step else ""
        coverage += "" if of_all_ranks else " on this rank"
        self.info(errors.text(coverage, "the same tensors" if has_yardsticks else "those of the first run"))

    def _log_layers(self, store: ReferenceStore) -> None:
        """Log which layers are lossless, and why, and the memory of the references of others."""
        states = list(store.states.values())
        coded = [state for state in states if state.saves_time]
        self._log_once(_uncoded([state for state in states if not state.saves_time], len(states), self._slow_axes))
        memory = _reference_memory(coded, len({key for key, _ in store.states}), store)
        if memory and not all(state.has_references for state in coded):
            self.warn(memory)  # in every run
        else:
            self._log_once(memory)

    def _log_once(self, message: str | None) -> None:
        """Log a message, if there is one, unless it was logged before."""
        if message not in self._logged:
            self._logged.add(message)
            self.info(message)


def _uncoded(uncoded: Sequence[LayerState], num_lossy: int, slow_axes: Iterable[str]) -> str | None:
    """Return a message if the host would take longer to encode some layers than the links save, else None.

    Args:
        uncoded: these layers.
        num_lossy: number of layers that the schedule codes, with these.
        slow_axes: names of all slow axes.
    """
    if not uncoded:
        return None
    saved, added = max(state.coding_seconds for state in uncoded)
    return (
        f"{len(uncoded)} of {num_lossy} layers are lossless: coding would save {1e3 * saved:.2g} ms of "
        f"communication and add {1e3 * added:.2g} ms of host time to a layer; --cocodiff_slow_axes "
        f"{','.join(slow_axes)} compresses them anyway"
    )


def _reference_memory(coded: Sequence[LayerState], num_layers: int, store: ReferenceStore) -> str | None:
    """Return a message with the memory of link references, its budget, and how many layers have none for lack of it.

    Args:
        coded: layers that are coded, or would be if memory sufficed, in all branches; None are named if there are none.
        num_layers: number of all layers.
        store: the references.
    """
    if not coded:
        return None
    predicted, single = (sum(column) / GIB for column in zip(*(state.planned_bytes for state in coded), strict=True))
    size = f"link references of {num_layers} layers: {predicted:.3g} GiB per rank"
    if not store.predicts:
        size += f", {single:.3g} GiB without prediction (in use)"
    if math.isinf(store.budget):
        return f"{size}; --cocodiff_memory_budget sets a limit"
    num_without = sum(not state.has_references for state in coded)
    origin = "free memory" if store.has_default_budget else "--cocodiff_memory_budget"
    how = "are lossless" if any(state.is_exact for state in coded) else "have none and send 8 bits"
    advice = "; free memory, use more ranks or raise the budget, to send fewer" if num_without else ""
    return (
        f"{size}; memory budget {store.budget / GIB:.3g} GiB by {origin}: {num_without} of {len(coded)} layers "
        f"{how}{advice}"
    )
