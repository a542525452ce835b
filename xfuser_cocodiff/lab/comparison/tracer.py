"""Traces the last steps of a run with torch.profiler, in which the plugin's exchanges have named ranges."""

from pathlib import Path

import torch

STEPS = 2
"""Steps at the end of a run that are traced: by then nothing is learned or tried any more."""


class Tracer:
    """Traces one run after the other into the same file, so that the last one stays."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._profiler: torch.profiler.profile | None = None

    def stands(self, steps: int, total: int | None) -> None:
        """Say how many steps are done, of how many if that is known: at the begin of a run and after each step."""
        if steps == total:  # what follows is not denoising
            self.stop()
        elif steps == max(0, (total or 1 + STEPS) - STEPS):
            self._start()

    def _start(self) -> None:
        self.stop()
        # Exchanges of several stages run in a thread of their own.
        every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        self._profiler = torch.profiler.profile(experimental_config=every_thread)
        self._profiler.start()

    def stop(self) -> None:
        """End the trace, if one is being taken, and write it."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        profiler.export_chrome_trace(str(self.file))
