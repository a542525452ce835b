"""Plan policy: the plan of each message, and whether a tensor is sent early; the same on all ranks of a group."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from xfuser_cocodiff.engine.topology.plans import Plan


@dataclass(frozen=True)
class PlanPolicy:
    """Rules that choose plans and early sends by size; identical on every rank."""

    plans: tuple[tuple[int, Plan], ...]
    """Plans of all-to-alls: pairs of an upper limit of the message size in bytes and a plan, ascending; the last plan
    is used for all larger sizes."""
    sends_early: Callable[[int, int], bool] = lambda early_bytes, all_bytes: True
    """Whether a tensor is sent early, in a message of its own, given its size and that of all tensors of the message
    that would contain it, in bytes."""
    splits_heads: Callable[[int, int, int, int], bool] | None = None
    """Whether so many head groups are worth timing against fewer, given the sizes of Q, K and V and of O in bytes,
    and both numbers. Of coded layers, it is asked of those that gather K and V. None where they are not tried: on CPUs,
    and where the links are unknown."""
    gathers_kv: Callable[[Sequence[int], Sequence[int]], bool] | None = None
    """Whether it is worth timing to gather K and V along the outermost axes, given the sizes of Q, K and V in bytes as
    they are sent by heads, and with gathered K and V. None where it is not tried."""
    choose_gather: Callable[[int], Plan | None] = lambda block_bytes: None
    """Plan of an all-gather, given the block size in bytes; None stands for the default of the mesh."""
    graph_early_bytes: int | None = 0
    """Smallest size in bytes of a tensor that compiled graphs send early; None if they never do."""

    @classmethod
    def fixed(cls, plan: Plan, **rules: Any) -> "PlanPolicy":
        """Return the policy of one plan for all sizes, with other rules by name."""
        return cls(((0, plan),), **rules)

    def choose(self, message_bytes: int) -> Plan:
        """Return the plan of an all-to-all of this message size, which may be symbolic in a graph that is traced."""
        for limit, plan in self.plans[:-1]:
            if message_bytes < limit:
                return plan
        return self.plans[-1][1]

    def sends_early_in_graph(self, early_bytes: int) -> bool:
        """Return whether the graph that is being traced sends a tensor of this size early."""
        return self.graph_early_bytes is not None and early_bytes >= self.graph_early_bytes
