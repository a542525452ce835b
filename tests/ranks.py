"""Real gloo ranks for tests: forked from a server that has all imports done, met over a file, one thread each.

A test has ranks of its own, and may leave whatever it likes behind in them: patches, groups, runtime states, variables.
What is the same for all of them, and takes seconds, is done before the fork (`tests/warm.py`).
"""

import multiprocessing
import os
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

TIMEOUT = 600
"""Seconds after which a hanging case is broken off: a guard against deadlock, not a bound on speed."""
GRACE = 60
"""The same, after one rank has failed."""


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
        hanging = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
        found = [_read(*pair) for pair in zip(results, processes, strict=True)]
        assert len(hanging) < world_size, f"all {world_size} ranks were still waiting after {TIMEOUT} s"
        return found


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _wait(ranks: list[tuple[Any, Path]]) -> None:
    """Wait for processes that leave results; when one has failed, the others have a moment to fail as well."""
    deadline = time.monotonic() + TIMEOUT
    running = {process.sentinel: (process, result) for process, result in ranks}
    while running and (left := deadline - time.monotonic()) > 0:
        for ended in wait(list(running), left):
            process, result = running.pop(ended)
            process.join()
            if isinstance(_read(result, process), Exception):
                deadline = min(deadline, time.monotonic() + GRACE)


def _read(file: Path, process: Any) -> Any:
    if not file.exists():
        return RuntimeError(f"no result; the process ended with exit code {process.exitcode}")
    return torch.load(file, weights_only=False)


def _rank(case: Callable, rank: int, world_size: int, folder: str, env: dict[str, str], args: tuple) -> None:
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
