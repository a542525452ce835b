"""Traces the last steps of a run with torch.profiler, in which the plugin's communication has named ranges."""

from pathlib import Path

import torch

STEPS = 2
"""Number of steps that are traced. They are the last ones of a run, when autotuning and warm-up are over."""


class Tracer:
    """Tracer of one run after the other into one file, which holds the last run."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._profiler: torch.profiler.profile | None = None

    def update(self, done: int, total: int | None) -> None:
        """Start or stop the trace; call it when a run begins and after each step.

        Args:
            done: completed steps of the run.
            total: steps of the run, if known. Otherwise all steps but the first are traced.
        """
        if done == total:  # decoding follows, which is not traced
            self.stop()
        elif done == max(0, (total or 1 + STEPS) - STEPS):
            self._start()

    def _start(self) -> None:
        self.stop()
        # All-to-alls of several stages run in a thread of their own.
        every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self._profiler = torch.profiler.profile(experimental_config=every_thread)
        self._profiler.start()

    def stop(self) -> None:
        """Stop the trace, if one is running, and write it."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        profiler.export_chrome_trace(str(self.file))
