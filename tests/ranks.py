"""Real gloo ranks for tests: forked from a server that has all imports done, met over a file, one thread each.

A test has ranks of its own, and may leave whatever it likes behind in them: patches, groups, runtime states, variables.
What is the same for all of them, and takes seconds, is done before the fork (`tests/warm.py`).
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
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.warm"])

QUICK_TIMEOUT, SLOW_TIMEOUT = 75, 600
TIMEOUT = SLOW_TIMEOUT
"""Seconds after which a hanging case is ended: a guard against deadlock, not a bound on speed, so ranks that still
compute are left until SLOW_TIMEOUT. conftest sets it for each test; on two cores no quick case takes a fifth of it."""
GRACE = 30
"""The same, after one rank has failed."""
STACK_PATIENCE = 5
"""Seconds for a hanging rank to write its stack; one that was stopped never does."""


def run(
    case: Callable, world_size: int, *args: Any, env: dict[str, str] | None = None, anew: bool = False
) -> list[Any]:
    """Call ``case(rank, *args)`` on `world_size` gloo ranks and return what each returned.

    Exceptions in ranks are raised here, with the ranks' tracebacks; :func:`outcomes` returns them instead. Ranks that
    use a GPU have to start anew: loading xDiT initialises CUDA, which a fork does not survive.
    """
    results = outcomes(case, world_size, *args, env=env, anew=anew)
    failures = [f"rank {rank}: {getattr(r, 'text', r)}" for rank, r in enumerate(results) if isinstance(r, Exception)]
    assert not failures, "\n".join(failures)
    return results


def outcomes(
    case: Callable,
    world_size: int,
    *args: Any,
    env: dict[str, str] | None = None,
    anew: bool = False,
    hosted: bool = False,
    lost: int | None = None,
) -> list[Any]:
    """As :func:`run`, with the exceptions of ranks in the place of their results.

    Ranks that are `hosted` meet at a store inside rank 0, which goes with it, as mpiexec and the like have it. A rank
    that is `lost` on purpose is not waited for: it ends with the others.
    """
    how = multiprocessing.get_context("spawn") if anew else context
    env = {**(env or {}), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if hosted else env
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            how.Process(target=_rank, args=(case, rank, world_size, folder, env or {}, args), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        results = [Path(folder, f"result{rank}") for rank in range(world_size)]
        _wait([pair for rank, pair in enumerate(zip(processes, results, strict=True)) if rank != lost])
        hanging = {rank: process.pid for rank, process in enumerate(processes) if rank != lost and process.is_alive()}
        stacks = _stacks(hanging, folder)
        for process in processes:
            process.kill()
            process.join()
        found = [_read(*pair) for pair in zip(results, processes, strict=True)]
    for rank, stack in stacks.items():
        found[rank] = RuntimeError(f"still running, in\n{stack or 'an unknown place: it wrote no stack'}")
    ended = [result for rank, result in enumerate(found) if rank not in (*hanging, lost)]
    if hanging and not any(isinstance(result, Exception) for result in ended):
        each = "\n".join(f"rank {rank}: {found[rank]}" for rank in hanging)
        raise AssertionError(f"{len(hanging)} of {world_size} ranks were still running after {TIMEOUT} s\n{each}")
    return found


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _wait(ranks: list[tuple[Any, Path]]) -> None:
    """Wait for processes that leave results; when one has failed, the others have a moment to fail as well."""
    latest = time.monotonic() + SLOW_TIMEOUT
    deadline = min(latest, time.monotonic() + TIMEOUT)
    running = {process.sentinel: (process, result) for process, result in ranks}
    while running:
        if (left := deadline - time.monotonic()) <= 0:
            if time.monotonic() >= latest or not _compute([process.pid for process, _ in running.values()]):
                return
            left = GRACE
        for ended in wait(list(running), left):
            process, result = running.pop(ended)
            process.join()
            if isinstance(_read(result, process), Exception):
                deadline = min(deadline, time.monotonic() + GRACE)


def _compute(pids: list[int]) -> bool:
    """Return whether some process runs, or would on a free core, for more of a second than those that poll."""
    runs = 0
    for _ in range(20):
        time.sleep(0.05)
        with contextlib.suppress(OSError):  # it has just ended
            threads = (thread for pid in pids for thread in Path(f"/proc/{pid}/task").glob("*/stat"))
            runs += any(thread.read_text().rpartition(")")[2].split()[0] == "R" for thread in threads)
    return runs > 5


def _stacks(hanging: dict[int, int], folder: str) -> dict[int, str]:
    """Return the stack of each process by its rank; a rank in the last barrier has ended its case."""
    files = {rank: Path(folder, f"stack{rank}") for rank in hanging}
    for pid in hanging.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    deadline = time.monotonic() + STACK_PATIENCE
    while time.monotonic() < deadline and not all(file.exists() and file.stat().st_size for file in files.values()):
        time.sleep(0.05)
    time.sleep(0.05 if hanging else 0)  # for the rest of it
    return {rank: file.read_text() if file.exists() else "" for rank, file in files.items()}


def _read(file: Path, process: Any) -> Any:
    if not file.exists():
        return RuntimeError(f"no result; the process ended with exit code {process.exitcode}")
    return torch.load(file, weights_only=False)


def _rank(case: Callable, rank: int, world_size: int, folder: str, env: dict[str, str], args: tuple) -> None:
    faulthandler.register(signal.SIGUSR1, os.open(f"{folder}/stack{rank}", os.O_CREAT | os.O_WRONLY))
    torch.set_num_threads(1)
    os.environ.update(env, RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    place = "env://" if "MASTER_PORT" in env else f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=world_size)
    try:
        result = case(rank, *args)
        # A rank that leaves closes connections that others may still read from.
        dist.barrier()
    except Exception as error:
        result = error
        error.text = traceback.format_exc()
    partial = Path(folder, f"partial{rank}")
    torch.save(result, partial)
    partial.rename(Path(folder, f"result{rank}"))
    os._exit(0)  # destructors of a world that may be half gone have nothing to add
