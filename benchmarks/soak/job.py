"""A job: ranks forked from this process, which has imported everything, and what they leave behind."""

import contextlib
import faulthandler
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Collection, Iterator
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.soak.fault import Fault
from benchmarks.soak.injection import TIME_FILE
from benchmarks.soak.rank_worker import Outcome, RankWorker, Settings
from benchmarks.soak.request import Request
from xfuser_cocodiff.lab.emulation import user_namespace

END_SECONDS = 20.0
"""How long ranks may take to end."""
STACK_SECONDS = 2.0
HANGS, DIED = "hangs", "died"
"""Errors of ranks that sent no outcome in time, and of ranks that ended."""
_TEMPORARY = "tmp"


class Job:
    """Ranks of a job, each in a process of its own.

    Args:
        settings: of the job.
        timeout: longest time of a request in seconds; after it, a rank hangs.
        parent: folder of the job's own one, which is removed when the job ends.
    """

    def __init__(self, settings: Settings, timeout: float, parent: Path) -> None:
        self._timeout = timeout
        self.folder = Path(tempfile.mkdtemp(prefix="job-", dir=parent))
        (self.folder / _TEMPORARY).mkdir()
        context = multiprocessing.get_context("fork")
        self._shared_memory = _shared_memory()
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        try:
            for rank in range(settings.ranks):
                own, other = context.Pipe()
                arguments = rank, settings, self.folder, other, [own, *self._pipes], os.getpid()
                process = context.Process(target=_run_rank, args=arguments, daemon=True)
                process.start()
                other.close()
                self._processes.append(process)
                self._pipes.append(own)
        except BaseException:
            self.end()
            raise

    def run(self, request: Request, fault: Fault | None = None) -> list[Outcome]:
        """Run a request on all ranks and return what came of it on each; no rank may take longer than the timeout."""
        self.send(request, fault)
        return self.receive(fault)

    def send(self, request: Request, fault: Fault | None = None) -> None:
        """Send a request to all ranks."""
        command = {"request": request.to_json(), "fault": fault and fault.to_json()}
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # a rank that has ended; its outcome says so
                pipe.send_bytes(json.dumps(command).encode())

    def receive(self, fault: Fault | None = None) -> list[Outcome]:
        """Return what came of the request that was sent, on each rank."""
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + self._timeout
        # A rank that is stopped for good is killed at the end; the others say what came of it.
        stopped = fault.victim if fault and fault.kind == "stopped" else None
        expected = [rank for rank in self._ranks if rank != stopped]
        while missing := [rank for rank in expected if rank not in outcomes]:
            ready = wait([self._pipes[rank] for rank in missing], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            outcomes |= {rank: self._receive(rank) for rank in missing if self._pipes[rank] in ready}
        stacks = self._stacks([rank for rank in expected if rank not in outcomes])
        return [outcomes.get(rank) or Outcome(error=HANGS, message=stacks.get(rank, "")) for rank in self._ranks]

    @property
    def _ranks(self) -> range:
        return range(len(self._processes))

    def _receive(self, rank: int) -> Outcome:
        try:
            return Outcome(**json.loads(self._pipes[rank].recv_bytes()))
        except (EOFError, OSError):
            self._processes[rank].join(END_SECONDS)
            return Outcome(error=DIED, message=f"exit code {self._processes[rank].exitcode}\n{self.log(rank)}")

    def log(self, rank: int) -> str:
        """Return the end of a rank's output."""
        file = self.folder / f"log{rank}"
        return file.read_text(errors="replace")[-3000:] if file.exists() else ""

    def fault_time(self) -> float | None:
        """Return when the fault struck, on the clock that all ranks share."""
        file = self.folder / TIME_FILE
        return float(file.read_text()) if file.exists() else None

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """Return the stacks of ranks that hang."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
        if ranks:
            time.sleep(STACK_SECONDS)
        files = {rank: self.folder / f"stack{rank}" for rank in ranks}
        return {rank: file.read_text() for rank, file in files.items() if file.exists()}

    def end(self) -> list[str]:
        """End all ranks, and return what they leave behind on the machine."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(b"null")
        deadline = time.monotonic() + END_SECONDS
        for process in self._processes:
            if not _is_stopped(process.pid):
                process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        left = self._left_behind([process.pid for process in self._processes])
        for process in self._processes:
            process.close()
        shutil.rmtree(self.folder)
        return left

    def _left_behind(self, sessions: list[int]) -> list[str]:
        processes = [f"process {pid} of rank {sessions.index(sid)}" for pid, sid in _sessions() if sid in sessions]
        files = [f"temporary file {file.name}" for file in (self.folder / _TEMPORARY).iterdir()]
        new = _shared_memory() - self._shared_memory
        shared = [f"shared memory {name}" for name in new if names_process(name, sessions)]
        return [*processes, *files, *shared]


def names_process(name: str, pids: Collection[int]) -> bool:
    """Return whether a file name contains one of the process IDs, as a whole number."""
    return not {*map(str, pids)}.isdisjoint(re.findall(r"\d+", name))


def _is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _sessions() -> Iterator[tuple[int, int]]:
    """Yield process ID and session of all processes but zombies."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session, *_ = stat.read_text().rpartition(")")[2].split()
            if state != "Z":
                yield int(stat.parent.name), int(session)


def _shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {file.name for file in folder.iterdir()} if folder.exists() else set()


# On a rank.


def _run_rank(
    rank: int, settings: Settings, folder: Path, commands: Connection, inherited: list[Connection], parent: int
) -> None:
    """Run a rank until it is told to end, or the process that has started it is gone."""
    for pipe in inherited:  # or this rank would keep the pipes of others open
        pipe.close()
    user_namespace.end_with_parent(parent)
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command
    for number in (signal.SIGTERM, signal.SIGHUP):  # which the command handles
        signal.signal(number, signal.SIG_DFL)
    log = os.open(folder / f"log{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for output in (1, 2):
        os.dup2(log, output)
    faulthandler.register(signal.SIGUSR1, os.open(folder / f"stack{rank}", os.O_CREAT | os.O_WRONLY))
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder / _TEMPORARY)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(settings.ranks), LOCAL_RANK=str(rank))
    status = 1
    try:
        _serve(rank, settings, folder, commands)
        status = 0
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        if status:
            traceback.print_exc()
        os._exit(status)  # without destructors, which could fail in a world that has lost ranks


def _serve(rank: int, settings: Settings, folder: Path, commands: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=settings.ranks)
    worker = RankWorker(rank, settings, folder)
    while command := json.loads(commands.recv_bytes()):
        request = Request(**{**command["request"], "prompts": tuple(command["request"]["prompts"])})
        fault = Fault(**command["fault"]) if command["fault"] else None
        commands.send_bytes(json.dumps(asdict(worker.run(request, fault))).encode())
