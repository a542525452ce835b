"""A fact: one thing to find out on a GPU, and the setting in which it is found out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from xfuser_cocodiff.engine.topology import devices

T = TypeVar("T")
Result = dict[str, Any]
"""JSON values."""


class NotAvailableError(RuntimeError):
    """What a fact needs is missing on this machine."""


class LaunchRanks(Protocol):
    """Runs a function of :mod:`rank_cases` on several ranks that share the device, and returns rank 0's result."""

    def __call__(self, case: str, count: int, **arguments: Any) -> Result: ...


RunCommand = Callable[[Sequence[str], float], str]
"""Runs a command with a time limit in seconds, and returns its output; raises RuntimeError if it fails."""


@dataclass(frozen=True)
class Setting:
    """The machine on which facts are found out, and how they start processes on it."""

    folder: Path
    """Folder of the results."""
    device: torch.device
    """The GPU; in a dry run the CPU."""
    is_dry_run: bool
    """Whether sizes are toy sizes, and no device is needed."""
    launch_ranks: LaunchRanks
    """Runs ranks that share the device."""
    run_command: RunCommand
    """Runs a command."""

    def pick(self, real: T, toy: T) -> T:
        """Return one of two sizes."""
        return toy if self.is_dry_run else real

    def require_device(self, purpose: str) -> None:
        """Check that there is an accelerator.

        Raises:
            NotAvailableError: there is none.
        """
        if not devices.capabilities(self.device.type).is_asynchronous:
            raise NotAvailableError(f"{purpose} needs a GPU")


@dataclass(frozen=True)
class Fact:
    """One thing to find out."""

    name: str
    """Name in records and documentation."""
    measure: Callable[[Setting], Mapping[str, Any]]
    """Finds it out; raises NotAvailableError if something is missing."""
    seconds: float
    """Time limit."""
