"""The kinds of faults of a soak test, as data: where each strikes, and what has to follow."""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from benchmarks.soak.request import Request

Scope = Literal["run", "job"]


@dataclass(frozen=True)
class FaultKind:
    """A kind of fault."""

    name: str
    description: str
    scope: Scope
    """Where it strikes: in a request of a job that goes on (run), or in one that ends its job (job)."""
    error: str | None = None
    """Exception that every rank raises (run); None if the request has to return."""
    is_comparable: bool = True
    """Whether the request, if it returns, has to have the bits of a fresh one."""
    names_victim: str = ""
    """What the error of a surviving rank has to contain (job); {victim} is the rank at fault."""
    strikes_layer: bool = False
    """Whether it strikes inside a layer, which the request then has to run eagerly and in every step."""


_LOST = "rank {victim} is lost or unresponsive"
KINDS = {
    kind.name: kind
    for kind in (
        FaultKind("callback_error", "a callback raises ValueError on every rank", "run", "ValueError"),
        FaultKind("interrupt", "KeyboardInterrupt in a callback, as Ctrl-C sends it", "run", "KeyboardInterrupt"),
        FaultKind("interrupt_in_layer", "KeyboardInterrupt in a layer", "run", "KeyboardInterrupt", strikes_layer=True),
        FaultKind("generator_exit", "GeneratorExit in a callback: a generator was dropped", "run", "GeneratorExit"),
        FaultKind("declared_run_dropped", "a generator with a declared run is dropped half way, before", "run"),
        FaultKind("out_of_memory", "out of memory in a layer (fake)", "run", "OutOfMemoryError", strikes_layer=True),
        FaultKind("error_kept", "an error that one rank keeps, with the frames of its run", "run", "ValueError"),
        FaultKind("nan", "NaN in latents between two steps", "run", is_comparable=False),
        FaultKind("nan_on_one_rank", "NaN in the latents of one rank", "run", is_comparable=False),
        FaultKind("clock_forward", "clocks of one rank jump an hour ahead in mid-run", "run"),
        FaultKind("reinstall", "`uninstall` and `install` between runs", "run"),
        FaultKind("slow_rank", "one rank sleeps in every step", "run"),
        FaultKind("paused_rank", "one rank is stopped (SIGSTOP) for a second", "run"),
        FaultKind("child_process", "one rank starts a process in mid-run", "run"),
        FaultKind("raises_alone", "a callback raises on one rank only", "job", names_victim="rank {victim} is alive"),
        FaultKind("killed", "one rank is killed (SIGKILL) in mid-run", "job", names_victim=_LOST),
        FaultKind("stopped", "one rank is stopped (SIGSTOP) for good", "job", names_victim=_LOST),
        FaultKind(
            "connections_lost", "connections of one rank are shut down", "job", names_victim="communication along"
        ),
    )
}
"""All kinds by name."""


@dataclass(frozen=True)
class Fault:
    """A fault of a campaign: its kind, and where and when it strikes."""

    kind: str
    victim: int
    """Rank that it strikes, if it strikes one."""
    step: int
    """Step of the request after which it strikes."""

    @property
    def of_kind(self) -> FaultKind:
        """The kind."""
        return KINDS[self.kind]

    def to_json(self) -> dict[str, Any]:
        """Return the fault as JSON values."""
        return asdict(self)


def draw(seed: int, number: int, kinds: Sequence[str], ranks: int, request: Request) -> Fault:
    """Return a fault of a campaign; kinds take turns, so that each occurs."""
    generator = random.Random(f"fault {seed} {number}")
    return Fault(kinds[number % len(kinds)], generator.randrange(ranks), generator.randrange(max(1, request.steps - 1)))


def parse_kinds(text: str) -> list[str]:
    """Parse the names of kinds in `--faults`.

    Raises:
        ValueError: a kind is unknown.
    """
    names = [*KINDS] if text == "all" else [] if text == "none" else text.split(",")
    if unknown := [name for name in names if name not in KINDS]:
        raise ValueError(f"--faults {','.join(unknown)} is not valid; valid are all, none and {', '.join(KINDS)}")
    return names
