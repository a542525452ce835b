"""A job: ranks forked from this process, which has imported everything. Each keeps engines and runs requests."""

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.soak.faults import Fault
from benchmarks.soak.request import Request

END_SECONDS = 20.0
"""How long ranks may take to end."""
HANGS, DIED = "hangs", "died"
"""Errors of ranks that sent no outcome in time, and of ranks that ended."""
_ENVIRONMENT = {
    # More than one thread would not survive the fork.
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    **{"TORCH_CPP_LOG_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "LOG_LEVEL": "warning"},
}
"""Variables that libraries read when they are loaded, so that ranks cannot set them."""


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
    """Class and message of the exception; None if the request returned."""
    resources: dict[str, int] | None = None
    """What the process holds after it; None if it hangs or has ended."""


class Job:
    """Ranks of a job, each in a process of its own.

    Args:
        settings: of the job.
        timeout: longest time of a request in seconds; after it, a rank hangs.
    """

    def __init__(self, settings: Settings, timeout: float) -> None:
        self._timeout, self._folder = timeout, Path(tempfile.mkdtemp(prefix="cocodiff-job-"))
        context = multiprocessing.get_context("fork")
        pipes = [context.Pipe() for _ in range(settings.ranks)]
        self._pipes = [own for own, _ in pipes]
        self._processes = [
            context.Process(
                target=_run_rank,
                args=(rank, settings, self._folder, other, _all_but(other, pipes), timeout),
                daemon=True,
            )
            for rank, (_, other) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        for _, other in pipes:
            other.close()

    def run(self, request: Request, fault: Fault | None = None) -> list[Outcome]:
        """Run a request on all ranks and return what came of it on each; no rank may take longer than the timeout.

        Args:
            request: the request.
            fault: strikes it.
        """
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # a rank that has ended; its outcome says so
                pipe.send((request, fault))
        outcomes, deadline = dict[int, Outcome](), time.monotonic() + self._timeout
        while missing := [pipe for rank, pipe in enumerate(self._pipes) if rank not in outcomes]:
            ready = wait(missing, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            outcomes |= {rank: self._receive(rank) for rank, pipe in enumerate(self._pipes) if pipe in ready}
        return [outcomes.get(rank) or Outcome(error=self._said(rank, HANGS)) for rank in range(len(self._pipes))]

    def _receive(self, rank: int) -> Outcome:
        try:
            return self._pipes[rank].recv()
        except (EOFError, OSError):
            return Outcome(error=self._said(rank, DIED))

    def _said(self, rank: int, what: str) -> str:
        file = self._folder / f"log{rank}"
        return f"{what}\n{file.read_text(errors='replace')[-3000:] if file.exists() else ''}"

    def end(self) -> None:
        """End all ranks."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        deadline = time.monotonic() + END_SECONDS
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self._folder)


def _all_but(end: Connection, pipes: Sequence[tuple[Connection, Connection]]) -> list[Connection]:
    """Return all other ends of pipes: a fork has them too, and a pipe has no end while one is open."""
    return [each for pipe in pipes for each in pipe if each is not end]


def prepare(models: Path) -> None:
    """Import xDiT with the plugin in the process that ranks are forked from; call this before torch is imported.

    Args:
        models: folder of the small models, for HF_HOME.
    """
    for name in [name for name in os.environ if name.startswith("COCODIFF_")]:
        os.environ.pop(name)  # requests say what they run with
    os.environ.update(_ENVIRONMENT, HF_HOME=str(models))
    import torch

    import xfuser_cocodiff

    torch.set_num_threads(1)
    xfuser_cocodiff.install()
    for name in ("xfuser.runner", "xfuser_cocodiff.xdit.session.startup"):
        importlib.import_module(name)
    importlib.import_module("xfuser_cocodiff.xdit.session.usp_versions").is_known()  # whose result is cached


# On a rank.


def _run_rank(
    rank: int, settings: Settings, folder: Path, commands: Connection, inherited: Sequence[Connection], timeout: float
) -> None:
    """Run requests until this rank is told to end, or the process that has started it is gone."""
    import torch.distributed as dist

    for pipe in inherited:
        pipe.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command
    log = os.open(folder / f"log{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(settings.ranks), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=settings.ranks)
    ranks_engines = _Engines(rank, settings)
    with contextlib.suppress(EOFError):
        while command := commands.recv():
            faulthandler.dump_traceback_later(0.95 * timeout, file=2)  # where a rank hangs
            commands.send(ranks_engines.run(*command))
            faulthandler.cancel_dump_traceback_later()
    sys.stderr.flush()
    os._exit(0)  # without destructors, which could fail in a world that has lost ranks


class _Engines:
    """Loaded models of one rank."""

    def __init__(self, rank: int, settings: Settings) -> None:
        from benchmarks.soak import rank_engine

        self._rank, self._settings, self._module = rank, settings, rank_engine
        self._engines: dict[str, rank_engine.RankEngine] = {}
        self._current: list[str] = []
        """Arguments of the runtime state, which name the model."""
        self._kept: list[BaseException] = []
        """The last error, which a caller may keep, with the frames of its run."""
        rank_engine.init_rank(rank, settings.ranks)

    def run(self, request: Request, fault: Fault | None) -> Outcome:
        """Run a request, and return what came of it."""
        outcome = Outcome()
        try:
            engine = self._engine(request)
            with fault.striking(self._rank, engine.pipe.transformer) if fault else contextlib.nullcontext():
                outcome.digest = engine.run(request.inputs)
        except BaseException as error:
            outcome.error, self._kept = f"{type(error).__name__}: {error}", [error]
        outcome.resources = _resources()
        gc.collect()  # Python's own full collections wait for a quarter of the 800,000 objects that imports create
        return outcome

    def _engine(self, request: Request) -> Any:
        """Return the engine of a request, with its options in force."""
        arguments = self._settings.arguments(request)
        current = [option for option in arguments if option not in request.prompts]
        if request.model not in self._engines:
            self._engines[request.model] = self._module.RankEngine(arguments)
        elif current != self._current:
            self._engines[request.model].configure(arguments)
        self._current = current
        return self._engines[request.model]


def _resources() -> dict[str, int]:
    """Return what this process holds. Resident memory includes what was freed; Python's blocks do not."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "python_blocks": sys.getallocatedblocks(),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }
