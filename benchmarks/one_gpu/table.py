"""The facts of each command in their order. Without PyTorch, so that the runner starts at once."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Fact:
    """One thing to measure, in processes of its own."""

    name: str
    """Name in the records and in docs/one_gpu.md."""
    function: str
    """Module of this package and generator function that yields the rows of the record."""
    seconds: float
    """Time limit; what earlier facts have left of theirs is added."""
    ranks: int = 1
    """Number of processes. Several share the GPU, and communicate by gloo."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Arguments of the function."""


COMMANDS: Mapping[str, tuple[tuple[Fact, ...], ...]] = {
    "1": (
        (Fact("versions", "kernel_facts.versions", 40),),
        (Fact("nccl", "rank_facts.nccl", 40),),
        (
            Fact("self_check_balanced", "kernel_facts.self_check", 120, arguments={"mode": "balanced"}),
            Fact("self_check_fast", "kernel_facts.self_check", 120, arguments={"mode": "fast"}),
        ),
        (
            Fact("memcheck", "kernel_facts.sanitize", 60, arguments={"tool": "memcheck"}),
            Fact("racecheck", "kernel_facts.sanitize", 60, arguments={"tool": "racecheck"}),
        ),
        (Fact("kernel_times", "kernel_facts.kernel_times", 60),),
        (Fact("layers", "kernel_facts.layers", 60),),
        (Fact("two_ranks", "rank_facts.two_ranks", 90, ranks=2),),
    ),
    "2": (
        (Fact("flux", "rank_facts.flux", 150, ranks=2),),
        (Fact("profile", "kernel_facts.profile", 60),),
        (Fact("compiled", "rank_facts.compiled", 70),),
        (Fact("compiled_two_ranks", "rank_facts.compiled", 70, ranks=2),),
    ),
}
"""Facts by command. Those of an inner tuple run at the same time."""
