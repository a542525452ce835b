"""The plan of each exchange: what the planner chooses for its size, or what a trial has found or confirmed.

A trial is never made while an exchange waits for its plan: until somebody has time for it, the planner's choice stands.
"""

import math
from collections import Counter

from xfuser_cocodiff.machine.plan import Plan
from xfuser_cocodiff.machine.planner import choose, choose_gather
from xfuser_cocodiff.machine.profile import Profile
from xfuser_cocodiff.machine.topology import Topology
from xfuser_cocodiff.measuring.plan_trial import contenders

SIZES = range(6, 40)
"""Powers of two for which graphs know plans."""


class Plans:
    """The plan for each size: what a trial has settled, or else what the planner chooses. All ranks of the group must
    call it alike.

    Messages of many sizes come up; those nearest to the same power of two share a plan.

    Args:
        topology: of the ranks.
        profile: what the planner goes by; until there is one, everything is flat.
        settled: plans that are settled already; further ones are added to it.
        is_tried: whether plans are to be tried.
    """

    def __init__(
        self,
        topology: Topology,
        profile: Profile | None = None,
        settled: dict[int, Plan] | None = None,
        is_tried: bool = True,
    ) -> None:
        self._flat, self._is_tried = Plan.flat(topology), is_tried
        self.settled: dict[int, Plan] = {} if settled is None else settled
        """Plans by size, a power of two, that a trial has found or confirmed."""
        self.asked: Counter[int] = Counter()
        """How often a plan was asked for, by size."""
        self._messages: dict[int, int] = {}
        self.learn(profile)

    def learn(self, profile: Profile | None) -> None:
        """Go by another profile from now on."""
        self.profile = profile
        self._chosen: dict[int, Plan] = {}
        self._contenders: dict[int, list[Plan]] = {}
        self._left: set[int] = set()
        self._gathers: dict[int, Plan] = {}

    def __call__(self, message_bytes: int) -> Plan:
        """The plan for a message of so many bytes."""
        size = _nearest(message_bytes)
        self.asked[size] += 1
        self._messages[size] = message_bytes
        return self.would_be(message_bytes)

    def would_be(self, message_bytes: int) -> Plan:
        """The plan that a message of so many bytes would go by, if there were one."""
        size = _nearest(message_bytes)
        return self.settled.get(size) or self._choice(size)

    def _choice(self, size: int) -> Plan:
        if self.profile is None:
            return self._flat
        if size not in self._chosen:
            self._chosen[size] = choose(self.profile, size)
        return self._chosen[size]

    def gather(self, block_bytes: int) -> Plan:
        """The planner's choice for an all-gather of blocks of so many bytes, once it knows the links."""
        assert self.profile
        if block_bytes not in self._gathers:
            self._gathers[block_bytes] = choose_gather(self.profile, block_bytes)
        return self._gathers[block_bytes]

    def message(self, size: int) -> int:
        """Bytes of the last message for which the plan of a size was asked: what a trial should send."""
        return self._messages.get(size, size)

    def contenders(self, size: int) -> list[Plan]:
        """Plans worth a trial for a size; see :func:`contenders`."""
        if self.profile is None:
            return []
        if size not in self._contenders:
            self._contenders[size] = contenders(self.profile, self.message(size))
        return self._contenders[size]

    @property
    def open(self) -> list[int]:
        """Sizes that came up and were not tried, those first for which most bytes were sent; none that nothing is known
        of."""
        if self.profile is None or not self._is_tried:
            return []
        untried = self.asked.keys() - self.settled.keys() - self._left
        return sorted(untried, key=lambda size: (-size * self.asked[size], size))

    def leave(self, size: int) -> None:
        """Leave a size to the planner: there is no time to try it."""
        self._left.add(size)

    def table(self) -> tuple[tuple[int, Plan], ...]:
        """What is known now, for graphs: see :attr:`Policy.traced`."""
        found: list[tuple[int, Plan]] = []
        for power in SIZES:
            plan, limit = self.settled.get(1 << power) or self._choice(1 << power), round(2 ** (power + 0.5))
            if found and found[-1][1] == plan:
                found.pop()
            found.append((limit, plan))
        return tuple(found)


def _nearest(message_bytes: int) -> int:
    return 1 << round(math.log2(message_bytes))
