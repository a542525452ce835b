"""Injects faults into a request on one rank: each is a context, which gives the callback of the request's steps."""

import contextlib
import functools
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import xfuser_cocodiff
from benchmarks.soak.fault import Fault

Callback = Callable[[int, torch.Tensor], torch.Tensor]
PAUSE_SECONDS, SLOW_SECONDS, HOUR = 1.0, 0.2, 3600.0
TIME_FILE = "fault_time"
"""File of the job's folder with the time at which a fault struck, on the clock that all ranks share."""
_kept: list[BaseException] = []
"""Errors that this rank keeps."""


@dataclass(frozen=True)
class Target:
    """What a fault strikes."""

    fault: Fault
    rank: int
    """This rank."""
    pipe: Any
    """Pipeline of the request."""
    folder: Path
    """Folder of the job."""
    reconfigure: Callable[[], None]
    """Starts a new session with the options of the request."""

    @property
    def is_victim(self) -> bool:
        """Whether the fault strikes this rank."""
        return self.rank == self.fault.victim

    def note_time(self) -> None:
        """Write down when the fault strikes."""
        partial = self.folder / f"{TIME_FILE}.{self.rank}"
        partial.write_text(repr(time.monotonic()))
        partial.replace(self.folder / TIME_FILE)


def inject(target: Target) -> contextlib.AbstractContextManager[Callback | None]:
    """Return the context of a request that a fault strikes; its value is the callback of the request's steps."""
    kind = target.fault.kind
    if kind in _AT_STEP:
        return contextlib.nullcontext(_at_step(target, _AT_STEP[kind]))
    return _AROUND[kind](target)


def keep(error: BaseException, target: Target) -> None:
    """Keep an error on the rank that the fault strikes, and drop earlier ones."""
    _kept.clear()
    if target.fault.kind == "error_kept" and target.is_victim:
        _kept.append(error)


def _at_step(target: Target, strike: Callable[[Target, torch.Tensor], torch.Tensor | None]) -> Callback:
    """Return a callback that strikes after the fault's step."""

    def callback(step: int, latents: torch.Tensor) -> torch.Tensor:
        if step != target.fault.step:
            return latents
        changed = strike(target, latents)
        return latents if changed is None else changed

    return callback


def _raising(kind: type[BaseException], alone: bool = False) -> Callable[[Target, torch.Tensor], None]:
    def strike(target: Target, _: torch.Tensor) -> None:
        if target.is_victim:
            target.note_time()
        if target.is_victim or not alone:
            raise kind("injected by the soak test")

    return strike


def _filled(value: float, alone: bool = False) -> Callable[[Target, torch.Tensor], torch.Tensor]:
    def strike(target: Target, latents: torch.Tensor) -> torch.Tensor:
        return torch.full_like(latents, value) if target.is_victim or not alone else latents

    return strike


def _on_victim(act: Callable[[], object]) -> Callable[[Target, torch.Tensor], None]:
    def strike(target: Target, _: torch.Tensor) -> None:
        if target.is_victim:
            target.note_time()
            act()

    return strike


def _pause() -> None:
    """Stop this process for a second; a child continues it."""
    command = f"sleep {PAUSE_SECONDS}; kill -CONT {os.getpid()}"
    with subprocess.Popen(["sh", "-c", command], start_new_session=False):
        os.kill(os.getpid(), signal.SIGSTOP)


def _shut_connections() -> None:
    """Shut down all TCP connections of this process."""
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(link).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(link.name))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        connection.shutdown(socket.SHUT_RDWR)


_AT_STEP: dict[str, Callable[[Target, torch.Tensor], torch.Tensor | None]] = {
    "callback_error": _raising(ValueError),
    "interrupt": _raising(KeyboardInterrupt),
    "generator_exit": _raising(GeneratorExit),
    "error_kept": _raising(ValueError),
    "raises_alone": _raising(ValueError, alone=True),
    "nan": _filled(float("nan")),
    "nan_on_one_rank": _filled(float("nan"), alone=True),
    "killed": _on_victim(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "stopped": _on_victim(lambda: os.kill(os.getpid(), signal.SIGSTOP)),
    "connections_lost": _on_victim(_shut_connections),
    "paused_rank": _on_victim(_pause),
    "child_process": _on_victim(lambda: subprocess.run(["true"], check=True)),
}
"""Faults that strike between two steps."""


@contextlib.contextmanager
def _in_layer(kind: type[BaseException], target: Target) -> Iterator[Callback]:
    """Raise inside the second attention layer, in the step after the fault's."""
    projections = [module for name, module in target.pipe.transformer.named_modules() if name.endswith(".to_k")]
    reached: list[int] = []

    def fail(*_: Any) -> None:
        if reached:
            reached.clear()
            raise kind("injected by the soak test")

    hook = projections[1].register_forward_pre_hook(fail)
    try:
        yield _at_step(target, lambda *_: reached.append(1))
    finally:
        hook.remove()


@contextlib.contextmanager
def _drop_declared_run(_: Target) -> Iterator[None]:
    def sample() -> Iterator[int]:
        with xfuser_cocodiff.run(steps=4) as run:
            for step in range(4):
                yield step
                run.step()

    steps = sample()
    next(steps), next(steps)
    del steps
    yield


@contextlib.contextmanager
def _jump(target: Target) -> Iterator[Callback]:
    """Let the clocks that Python reads jump an hour ahead, on one rank."""
    offset = [0.0]

    def jump(*_: object) -> None:
        if target.is_victim:
            offset[0] = HOUR

    def shifted(clock: Callable[[], float]) -> Callable[[], float]:
        return lambda: clock() + offset[0]

    with contextlib.ExitStack() as patches:
        for name in ("time", "monotonic", "perf_counter"):
            patches.enter_context(mock.patch.object(time, name, shifted(getattr(time, name))))
        yield _at_step(target, jump)


@contextlib.contextmanager
def _reinstall(target: Target) -> Iterator[None]:
    xfuser_cocodiff.uninstall()
    xfuser_cocodiff.install()
    target.reconfigure()
    yield


@contextlib.contextmanager
def _slow(target: Target) -> Iterator[Callback]:
    def wait(_: int, latents: torch.Tensor) -> torch.Tensor:
        if target.is_victim:
            time.sleep(SLOW_SECONDS)
        return latents

    yield wait


_AROUND: dict[str, Callable[[Target], contextlib.AbstractContextManager[Callback | None]]] = {
    "interrupt_in_layer": functools.partial(_in_layer, KeyboardInterrupt),
    "out_of_memory": functools.partial(_in_layer, torch.OutOfMemoryError),
    "declared_run_dropped": _drop_declared_run,
    "clock_forward": _jump,
    "reinstall": _reinstall,
    "slow_rank": _slow,
}
"""Faults around a whole request."""
