"""A job: ranks forked from this process, which has imported everything. Each keeps engines and runs requests."""

import contextlib
import faulthandler
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

from benchmarks.soak.faults import Fault
from benchmarks.soak.request import Outcome, Request

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
    options: tuple[str, ...] = ()
    """Options of the plugin beside those of a request."""
    is_stock: bool = False
    """Whether to run stock xDiT."""

    def arguments(self, request: Request) -> list[str]:
        """Return the arguments of xDiT for a request."""
        model = request.model_arguments(self.ranks)
        return model if self.is_stock else [*model, *request.plugin_arguments(self.ranks), *self.options]


class Job:
    """Ranks of a job, each in a process of its own.

    Args:
        settings: of the job.
        timeout: longest time of a request in seconds; after it, a rank hangs.
    """

    def __init__(self, settings: Settings, timeout: float) -> None:
        self._timeout, self._folder = timeout, tempfile.mkdtemp(prefix="cocodiff-job-")
        self._pipes: list[Connection] = []
        self._processes = []
        context = multiprocessing.get_context("fork")
        for rank in range(settings.ranks):
            own, other = context.Pipe()
            self._pipes.append(own)
            arguments = rank, settings, self._folder, other, [*self._pipes], timeout
            self._processes.append(context.Process(target=_run_rank, args=arguments, daemon=True))
            self._processes[-1].start()
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
        outcomes, deadline = dict[Connection, Outcome](), time.monotonic() + self._timeout
        while missing := [pipe for pipe in self._pipes if pipe not in outcomes]:
            ready = wait(missing, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            outcomes |= {pipe: self._receive(pipe) for pipe in missing if pipe in ready}
        return [outcomes.get(pipe) or Outcome(error=self._said(pipe, HANGS)) for pipe in self._pipes]

    def _receive(self, pipe: Connection) -> Outcome:
        try:
            return pipe.recv()
        except (EOFError, OSError):
            return Outcome(error=self._said(pipe, DIED))

    def _said(self, pipe: Connection, what: str) -> str:
        log = Path(self._folder, f"log{self._pipes.index(pipe)}")
        return f"{what}\n{log.read_text(errors='replace')[-3000:]}"

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


def _run_rank(
    rank: int, settings: Settings, folder: str, commands: Connection, inherited: Sequence[Connection], timeout: float
) -> None:
    """Run requests until this rank is told to end, or the process that has started it is gone."""
    from benchmarks.soak.rank_engines import RankEngines

    for pipe in inherited:  # which a fork has too: a pipe has no end while one is open
        pipe.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command
    log = os.open(f"{folder}/log{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    engines = RankEngines(rank, settings.ranks, folder)
    with contextlib.suppress(EOFError):
        while command := commands.recv():
            request, fault = command
            faulthandler.dump_traceback_later(0.95 * timeout, file=2)  # where a rank hangs
            commands.send(engines.run(request, settings.arguments(request), fault))
            faulthandler.cancel_dump_traceback_later()
    sys.stderr.flush()
    os._exit(0)  # without destructors, which could fail in a world that has lost ranks
