"""The faults of a soak test: what each does to a request on one rank, and what has to follow.

Each is a context around the request, whose value is the callback of the request's steps.
"""

import contextlib
import functools
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Callback = Callable[[int, torch.Tensor], torch.Tensor]
_Strike = Callable[["Target", torch.Tensor], torch.Tensor | None]
PAUSE_SECONDS = 1.0


@dataclass(frozen=True)
class Fault:
    """A fault of a request."""

    kind: str
    """Key of :data:`KINDS`."""
    victim: int
    """Rank that it strikes, if it strikes one."""
    step: int
    """Step of the request after which it strikes."""


@dataclass(frozen=True)
class Target:
    """What a fault strikes on one rank."""

    fault: Fault
    is_victim: bool
    """Whether the fault strikes this rank."""
    pipe: Any
    """Pipeline of the request."""


Inject = Callable[[Target], contextlib.AbstractContextManager[Callback | None]]


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    inject: Inject
    error: str | None = None
    """Words of the error of every rank, or of every survivor if it ends the job; None if the request has to return.
    {victim} is the rank at fault."""
    is_comparable: bool = True
    """Whether the request, if it returns, has to have the bits of a fresh one."""
    ends_job: bool = False
    """Whether it ends the job of the request; the victim may then not answer."""


def _at_step(strike: _Strike) -> Inject:
    """Return a fault that strikes after its step."""

    def inject(target: Target) -> contextlib.AbstractContextManager[Callback | None]:
        def callback(step: int, latents: torch.Tensor) -> torch.Tensor:
            changed = strike(target, latents) if step == target.fault.step else None
            return latents if changed is None else changed

        return contextlib.nullcontext(callback)

    return inject


def _raising(error: type[BaseException], alone: bool = False) -> Inject:
    def strike(target: Target, _: torch.Tensor) -> None:
        if target.is_victim or not alone:
            raise error("injected by the soak test")

    return _at_step(strike)


def _on_victim(act: Callable[[], object]) -> Inject:
    def strike(target: Target, _: torch.Tensor) -> None:
        if target.is_victim:
            act()

    return _at_step(strike)


def _nan(target: Target, latents: torch.Tensor) -> torch.Tensor | None:
    return torch.full_like(latents, float("nan")) if target.is_victim else None


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


@contextlib.contextmanager
def _in_layer(error: type[BaseException], target: Target) -> Iterator[Callback | None]:
    """Raise inside the second attention layer, in the step after the fault's."""
    projections = [module for name, module in target.pipe.transformer.named_modules() if name.endswith(".to_k")]
    reached: list[int] = []

    def fail(*_: Any) -> None:
        if reached:
            reached.clear()
            raise error("injected by the soak test")

    hook = projections[1].register_forward_pre_hook(fail)
    try:
        with _at_step(lambda *_: reached.append(1))(target) as callback:
            yield callback
    finally:
        hook.remove()


_LOST = "rank {victim} is lost or unresponsive"
KINDS = {
    "callback_error": Kind(_raising(ValueError), "ValueError"),
    "generator_exit": Kind(_raising(GeneratorExit), "GeneratorExit"),
    "interrupt_in_layer": Kind(functools.partial(_in_layer, KeyboardInterrupt), "KeyboardInterrupt"),
    "out_of_memory": Kind(functools.partial(_in_layer, torch.OutOfMemoryError), "OutOfMemoryError"),
    "nan_on_one_rank": Kind(_at_step(_nan), is_comparable=False),
    "paused_rank": Kind(_on_victim(_pause)),
    "raises_alone": Kind(_raising(ValueError, alone=True), "rank {victim} is alive", ends_job=True),
    "killed": Kind(_on_victim(lambda: os.kill(os.getpid(), signal.SIGKILL)), _LOST, ends_job=True),
    "stopped": Kind(_on_victim(lambda: os.kill(os.getpid(), signal.SIGSTOP)), _LOST, ends_job=True),
    "connections_lost": Kind(_on_victim(_shut_connections), "communication along", ends_job=True),
}
"""All kinds by name."""
