"""By which plan each message goes, and what is sent ahead: decisions that all ranks of a group take alike."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from xfuser_cocodiff.engine.topology.plans import Plan


@dataclass(frozen=True)
class PlanPolicy:
    """What exchanges go by; everything in it is the same on every rank."""

    choose: Callable[[int], Plan]
    """The plan for a message of so many bytes."""
    graph_plans: tuple[tuple[int, Plan], ...] = ()
    """Plans for graphs, each with the size below which it is used, ascending, the last one for all that is larger: as
    comparisons of sizes, they can be traced for sizes that are not known yet. Where there are none, `choose` is asked,
    which must then not look at the size."""
    sends_early: Callable[[int, int], bool] = lambda ahead_bytes, all_bytes: True
    """Whether a tensor of so many bytes is better sent ahead than in one message with others, of so many together."""
    choose_gather: Callable[[int], Plan | None] = lambda block_bytes: None
    """The plan of an all-gather of blocks of so many bytes; where there is none, the mesh's own is taken."""
    graph_early_bytes: int | None = 0
    """The same for graphs: bytes of a tensor from which it is sent ahead; None where it never is."""

    def plan_for(self, message_bytes: int) -> Plan:
        """The plan for a message of so many bytes, here or in the graph that is traced."""
        if not (self.graph_plans and torch.compiler.is_compiling()):
            return self.choose(message_bytes)
        for limit, plan in self.graph_plans[:-1]:
            if message_bytes < limit:
                return plan
        return self.graph_plans[-1][1]

    def sends_early_in_graph(self, ahead_bytes: int) -> bool:
        """Whether a tensor of so many bytes is sent ahead in the graph that is traced."""
        return self.graph_early_bytes is not None and ahead_bytes >= self.graph_early_bytes
