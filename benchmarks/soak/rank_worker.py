"""A rank of a job: keeps engines, runs the requests that it is told, and says what came of each."""

import gc
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.soak import injection, resources
from benchmarks.soak.fault import Fault
from benchmarks.soak.request import Request
from xfuser_cocodiff.lab.launching import rank_engine
from xfuser_cocodiff.lab.launching.rank_engine import RankEngine

COLLECT_EVERY = 25
"""Requests between full garbage collections. Python's own wait until new objects exceed a quarter of the 800,000 that
imports create, which takes hundreds of requests."""


@dataclass(frozen=True)
class Settings:
    """Settings of a job, the same on all ranks."""

    ranks: int
    cache: str = "off"
    """Folder of the tuning cache."""
    profile: str | None = None
    """File of a link profile; links are probed without one."""
    collective_seconds: float = 30.0
    """Longest time of a collective."""
    is_stock: bool = False
    """Whether to run stock xDiT."""

    def arguments(self, request: Request) -> list[str]:
        """Return the arguments of xDiT for a request."""
        model = request.model_arguments(self.ranks)
        if self.is_stock:
            return model
        profile = ["--cocodiff_profile", self.profile] if self.profile else []
        job = ["--cocodiff_cache", self.cache, "--cocodiff_timeout", str(self.collective_seconds), *profile]
        return [*model, *request.plugin_arguments(self.ranks), *job]


@dataclass
class Outcome:
    """What came of a request on one rank."""

    digest: str | None = None
    """SHA-256 of the latents; None on ranks that do not decode, and after an error."""
    error: str | None = None
    """Name of the exception's class."""
    message: str = ""
    at: float = 0.0
    """When the request ended, on the clock that all ranks share."""
    resources: dict[str, int] | None = None
    decisions: dict[str, Any] | None = None

    @property
    def has_returned(self) -> bool:
        """Whether the request returned."""
        return self.error is None


class RankWorker:
    """Runs requests on one rank; all ranks get the same.

    Args:
        rank: this rank.
        settings: of the job.
        folder: of the job.
    """

    def __init__(self, rank: int, settings: Settings, folder: Path) -> None:
        self._rank, self._settings, self._folder = rank, settings, folder
        self._engines: dict[tuple[str, bool, bool], RankEngine] = {}
        self._current: tuple | None = None
        """Engine and arguments of the runtime state."""
        self._num_requests = 0
        rank_engine.init_rank(rank, settings.ranks)

    def run(self, request: Request, fault: Fault | None = None) -> Outcome:
        """Run a request, and return what came of it."""
        outcome = Outcome()
        target: injection.Target | None = None
        try:
            engine = self._engine(request)
            if fault is None:
                outcome.digest = engine.run(request.inputs)
            else:
                target = injection.Target(
                    fault,
                    self._rank,
                    engine.pipe,
                    self._folder,
                    reconfigure=lambda: engine.configure(self._settings.arguments(request)),
                )
                with injection.inject(target) as callback:
                    outcome.digest = engine.run(request.inputs, callback)
        except BaseException as error:
            outcome.error, outcome.message = type(error).__name__, str(error)
            if target:
                injection.keep(error, target)
        outcome.at = time.monotonic()
        outcome.resources, outcome.decisions = resources.sample(), rank_engine.choices()
        self._num_requests += 1
        if self._num_requests % COLLECT_EVERY == 0:  # after the sample, which shows what only cycles hold
            gc.collect()
        return outcome

    def _engine(self, request: Request) -> RankEngine:
        """Return the engine of a request, with its options in force."""
        arguments = self._settings.arguments(request)
        current = (request.engine, tuple(option for option in arguments if option not in request.prompts))
        if request.engine not in self._engines:
            self._engines[request.engine] = RankEngine(arguments, request.compiled)
        elif current != self._current:
            self._engines[request.engine].configure(arguments)
        self._current = current
        return self._engines[request.engine]
