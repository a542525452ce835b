"""The plan of each exchange: what the planner chooses for its size."""

import functools
import math

from xfuser_cocodiff.machine import planner
from xfuser_cocodiff.machine.plan import Plan
from xfuser_cocodiff.machine.profile import Profile

SIZES = range(6, 40)
"""Powers of two for which graphs know plans."""


class Plans:
    """The planner's choices, each made once; sizes nearest to the same power of two share a plan.

    Args:
        profile: what the planner goes by.
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._choose = functools.cache(functools.partial(planner.choose, profile))
        self.gather = functools.cache(functools.partial(planner.choose_gather, profile))
        """The plan of an all-gather of blocks of so many bytes."""

    def __call__(self, message_bytes: int) -> Plan:
        """Return the plan for a message of so many bytes."""
        return self._choose(1 << round(math.log2(message_bytes)))

    def table(self) -> tuple[tuple[int, Plan], ...]:
        """Return all of them, for graphs; see :attr:`Policy.traced`."""
        found: list[tuple[int, Plan]] = []
        for power in SIZES:
            plan, limit = self._choose(1 << power), round(2 ** (power + 0.5))
            if found and found[-1][1] == plan:
                found.pop()
            found.append((limit, plan))
        return tuple(found)
