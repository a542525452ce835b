"""Ranks for tests, on gloo by default: single-threaded processes, forked from a server that has imported everything.

Each test has its own ranks and need not clean up in them: patches, groups, runtime states and variables end with them.
Imports, which take seconds, are done once before the fork (`tests/warm.py`).
"""

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.warm"])

QUICK_TIMEOUT, SLOW_TIMEOUT = 75, 600
TIMEOUT = SLOW_TIMEOUT
"""Seconds after which a hanging case is killed. It guards against deadlocks and does not limit speed: ranks that still
compute run until SLOW_TIMEOUT. Set by conftest for each test; on two cores quick cases take less than a fifth of it."""
GRACE = 30
"""Timeout in seconds after one rank has failed."""
STACK_SECONDS = 5
"""Time for a hanging rank to write its stack; a stopped one never does."""


def run(
    case: Callable,
    world_size: int,
    *args: Any,
    env: dict[str, str] | None = None,
    spawn: bool = False,
    backend: str = "gloo",
) -> list[Any]:
    """Call ``case(rank, *args)`` on `world_size` ranks and return their results.

    Exceptions in ranks are raised here with their tracebacks; :func:`outcomes` returns them instead.

    Args:
        case: function to run on every rank.
        world_size: number of ranks.
        args: further arguments of the function.
        env: environment variables of the ranks.
        spawn: whether to start new interpreters, as ranks on a GPU must: importing xDiT initializes CUDA, which cannot
            be forked.
        backend: of their process groups.
    """
    results = outcomes(case, world_size, *args, env=env, spawn=spawn, backend=backend)
    failures = [f"rank {rank}: {getattr(r, 'text', r)}" for rank, r in enumerate(results) if isinstance(r, Exception)]
    assert not failures, "\n".join(failures)
    return results


def outcomes(
    case: Callable,
    world_size: int,
    *args: Any,
    env: dict[str, str] | None = None,
    spawn: bool = False,
    store_on_rank_0: bool = False,
    lost_rank: int | None = None,
    backend: str = "gloo",
) -> list[Any]:
    """Return the results as :func:`run` does, with the exceptions of ranks that failed in their place.

    Args:
        case: function to run on every rank.
        world_size: number of ranks.
        args: further arguments of the function.
        env: environment variables of the ranks.
        spawn: whether to start new interpreters.
        store_on_rank_0: whether the rendezvous store is in rank 0, as under mpiexec, and not a file.
        lost_rank: rank that fails on purpose; it is not waited for and is killed at the end.
        backend: of their process groups.
    """
    start = multiprocessing.get_context("spawn") if spawn else context
    env = {**(env or {}), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if store_on_rank_0 else env
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            start.Process(target=_rank, args=(case, rank, world_size, folder, env or {}, args, backend), daemon=True)
            for rank in range(world_size)
        ]
        with mock.patch.dict(os.environ, env or {}) if spawn else nullcontext():  # LD_PRELOAD acts at the start only
            for process in processes:
                process.start()
        results = [Path(folder, f"result{rank}") for rank in range(world_size)]
        _wait([pair for rank, pair in enumerate(zip(processes, results, strict=True)) if rank != lost_rank])
        hanging = {
            rank: process.pid for rank, process in enumerate(processes) if rank != lost_rank and process.is_alive()
        }
        stacks = _stacks(hanging, folder)
        for process in processes:
            process.kill()
            process.join()
        outcome = [_read(*pair) for pair in zip(results, processes, strict=True)]
    for rank, stack in stacks.items():
        outcome[rank] = RuntimeError(f"still running, in\n{stack or 'an unknown place: it wrote no stack'}")
    ended = [result for rank, result in enumerate(outcome) if rank not in (*hanging, lost_rank)]
    if hanging and not any(isinstance(result, Exception) for result in ended):
        each = "\n".join(f"rank {rank}: {outcome[rank]}" for rank in hanging)
        raise AssertionError(f"{len(hanging)} of {world_size} ranks were still running after {TIMEOUT} s\n{each}")
    return outcome


def free_port() -> int:
    """Return an unused port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _wait(ranks: list[tuple[Any, Path]]) -> None:
    """Wait until all processes have written results; after one has failed, the others have GRACE seconds to end."""
    latest = time.monotonic() + SLOW_TIMEOUT
    deadline = min(latest, time.monotonic() + TIMEOUT)
    running = {process.sentinel: (process, result) for process, result in ranks}
    while running:
        if (left := deadline - time.monotonic()) <= 0:
            if time.monotonic() >= latest or not _are_computing([process.pid for process, _ in running.values()]):
                return
            left = GRACE
        for ended in wait(list(running), left):
            process, result = running.pop(ended)
            process.join()
            if isinstance(_read(result, process), Exception):
                deadline = min(deadline, time.monotonic() + GRACE)


def _are_computing(pids: list[int]) -> bool:
    """Return whether processes are runnable for a quarter of a second, unlike processes that only poll."""
    runs = 0
    for _ in range(20):
        time.sleep(0.05)
        with contextlib.suppress(OSError):  # it has just ended
            threads = (thread for pid in pids for thread in Path(f"/proc/{pid}/task").glob("*/stat"))
            runs += any(thread.read_text().rpartition(")")[2].split()[0] == "R" for thread in threads)
    return runs > 5


def _stacks(hanging: dict[int, int], folder: str) -> dict[int, str]:
    """Return the stacks of processes by rank; a rank in the last barrier has completed its case."""
    files = {rank: Path(folder, f"stack{rank}") for rank in hanging}
    for pid in hanging.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + STACK_SECONDS
    while time.monotonic() < deadline and not all(file.exists() and file.stat().st_size for file in files.values()):
        time.sleep(0.05)
    time.sleep(0.05 if hanging else 0)  # until the files are complete
    return {rank: file.read_text() if file.exists() else "" for rank, file in files.items()}


def _read(file: Path, process: Any) -> Any:
    if not file.exists():
        return RuntimeError(f"no result; the process ended with exit code {process.exitcode}")
    return torch.load(file, weights_only=False)


def _rank(
    case: Callable, rank: int, world_size: int, folder: str, env: dict[str, str], args: tuple, backend: str
) -> None:
    faulthandler.register(signal.SIGUSR1, os.open(f"{folder}/stack{rank}", os.O_CREAT | os.O_WRONLY))
    torch.set_num_threads(1)
    os.environ.update({"LOCAL_RANK": str(rank), **env}, RANK=str(rank), WORLD_SIZE=str(world_size))
    init_method = "env://" if "MASTER_PORT" in env else f"file://{folder}/rendezvous"
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size)
    try:
        result = case(rank, *args)
        # An exiting rank closes connections that others may still read from.
        dist.barrier()
    except Exception as error:
        result = error
        error.text = traceback.format_exc()
    partial = Path(folder, f"partial{rank}")
    torch.save(result, partial)
    partial.rename(Path(folder, f"result{rank}"))
    os._exit(0)  # without destructors, which could fail in a world that has lost ranks
