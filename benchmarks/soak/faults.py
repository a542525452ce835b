"""The faults of a soak test: what strikes a request inside an attention layer, and what has to follow."""

import contextlib
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

KILLED, INTERRUPTED = "killed", "interrupted"
ERRORS = {INTERRUPTED: "KeyboardInterrupt", KILLED: "rank {victim} is lost or unresponsive"}
"""Words of the error of every rank by kind of fault; if a rank is killed, of every survivor."""


@dataclass(frozen=True)
class Fault:
    """A fault of a request."""

    kind: str
    """Key of :data:`ERRORS`."""
    victim: int
    """Rank that is killed; all are interrupted."""
    call: int
    """Call of the transformer in which it strikes, counted from 0."""

    @contextlib.contextmanager
    def striking(self, rank: int, transformer: Any) -> Iterator[None]:
        """Return a context in which the fault strikes this rank in the second attention layer of its call."""
        projections = [module for name, module in transformer.named_modules() if name.endswith(".to_k")]
        calls = 0

        def strike(*_: Any) -> None:
            nonlocal calls
            calls += 1
            if calls <= self.call:
                return
            if self.kind == INTERRUPTED:
                raise KeyboardInterrupt("injected by the soak test")
            if rank == self.victim:
                os.kill(os.getpid(), signal.SIGKILL)

        hook = projections[1].register_forward_pre_hook(strike)
        try:
            yield
        finally:
            hook.remove()
