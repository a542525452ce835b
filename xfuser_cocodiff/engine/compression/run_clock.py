"""The clock of a run: its current step, and how many there are."""


class RunClock:
    """Steps of the run in progress, counted from 0."""

    def __init__(self) -> None:
        self.is_running = False
        """Whether a run is in progress."""
        self.step = self.first_step = 0
        """Current step, and that at which the run began."""
        self.total: int | None = None
        """Number of steps; None if unknown."""

    def begin(self, total: int | None, step: int) -> None:
        """Begin a run of so many steps at a step."""
        self.is_running, self.total = True, total
        self.step = self.first_step = step

    @property
    def is_first_step(self) -> bool:
        """Whether the run has not ended a step."""
        return self.step == self.first_step

    @property
    def is_over(self) -> bool:
        """Whether the last step has ended."""
        return self.step == self.total
