"""What a host may report of its runs, at the ends of steps and of runs."""

from xfuser_cocodiff.engine.compression.reference_store import ReferenceStore
from xfuser_cocodiff.engine.compression.step_report import RunErrors, StepReport


class RunReporter:
    """Reports nothing; a host that has messages for its users derives from it."""

    def expect_layers(self) -> None:
        """Note that a run begins, or continues with another transformer."""

    def log_step(self, report: StepReport, store: ReferenceStore, total: int | None) -> None:
        """Log what a step has changed.

        Args:
            report: report of the step.
            store: link references of the run.
            total: number of steps; None if unknown.
        """

    def log_errors(self, errors: RunErrors, first_step: int, of_all_ranks: bool, has_yardsticks: bool) -> None:
        """Log the errors of a run.

        Args:
            errors: errors of the run.
            first_step: first step that they cover, from 0: later ones of a run that was interrupted.
            of_all_ranks: whether they are those of all ranks that share the sequence, and not of this one.
            has_yardsticks: whether those of the errors were measured in this run, and not in an earlier one.
        """
