"""Plan policy: the plan of each message, and whether a tensor is sent early; the same on all ranks of a group."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from xfuser_cocodiff.engine.topology.plans import Plan


@dataclass(frozen=True)
class PlanPolicy:
    """Rules that choose plans and early sends by size; identical on every rank."""

    choose: Callable[[int], Plan]
    """Plan of an all-to-all, given the message size in bytes."""
    graph_plans: tuple[tuple[int, Plan], ...] = ()
    """Plans for compiled graphs: pairs of an upper size limit and a plan, ascending; the last plan is used for all
    larger sizes. Comparisons with these limits can be traced for symbolic sizes. If empty, `choose` is called, which
    must then not depend on the size."""
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

    def plan_for(self, message_bytes: int) -> Plan:
        """Return the plan of an all-to-all of this message size, in eager code or in the graph that is being traced."""
        if not (self.graph_plans and torch.compiler.is_compiling()):
            return self.choose(message_bytes)
        for limit, plan in self.graph_plans[:-1]:
            if message_bytes < limit:
                return plan
        return self.graph_plans[-1][1]

    def sends_early_in_graph(self, early_bytes: int) -> bool:
        """Return whether the graph that is being traced sends a tensor of this size early."""
        return self.graph_early_bytes is not None and early_bytes >= self.graph_early_bytes
