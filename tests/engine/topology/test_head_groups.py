"""The numbers of head groups that are worth timing, against times computed by hand."""

import dataclasses

import pytest

from tests.engine.topology.test_planner import profile_of
from xfuser_cocodiff.engine.topology.head_groups import divisors_to_try, gathered_head_groups_pay, head_groups_pay
from xfuser_cocodiff.engine.topology.plans import Plan


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        ((3, 3), [3]),
        ((4, 4), [2, 4]),
        ((6, 6), [2, 3]),
        ((12, 4), [2, 4]),
        ((6, 1), []),
        ((19, 19), []),
    ],
)
def test_divisors_of_all_heads_are_tried(heads: tuple[int, int], expected: list[int]) -> None:
    assert divisors_to_try(*heads) == expected


def test_head_groups_pay_if_they_hide_more_than_their_launches_cost() -> None:
    """Two ranks at 1 MB/s: 3 MB of Q, K and V and 1 MB of O take 2 s on the link, since each rank keeps a half."""
    machine = profile_of([2], [1e6], latency=0.01, launch=0.05)

    def pays(groups: int, fewer: int = 1, **changes: float) -> bool:
        changed = dataclasses.replace(machine, **changes)
        flat = Plan.flat(machine.topology)
        return head_groups_pay(changed, lambda size: flat, 3 * 10**6, 10**6, groups, fewer)

    # Two groups hide 1 s at best, and cost two more launches, half of which counts.
    assert pays(2) and pays(2, launch_seconds=0.98) and not pays(2, launch_seconds=1.0)
    # Four groups hide another 0.5 s, and cost four more launches.
    assert pays(4, 2, launch_seconds=0.23) and not pays(4, 2, launch_seconds=0.25)


def test_gathered_head_groups_pay_by_the_link_time_of_coded_k_and_v() -> None:
    """Two coordinates at 1 MB/s: of 4 MB of K and V a tenth is sent, in 0.4 s; two fast ranks move Q, K, V and O."""
    machine = profile_of([2, 2], [1e6, 1e9], latency=0.0, launch=0.01)
    slow = machine.topology.axes[0].name

    def pays(groups: int, fewer: int = 1, launch_seconds: float = 0.01) -> bool:
        changed = dataclasses.replace(machine, launch_seconds=launch_seconds)
        return gathered_head_groups_pay(changed, [slow], 6 * 10**6, 2 * 10**6, groups, fewer)

    # Two groups hide 0.2 s at best, and cost one more launch of each of three collectives, half of which counts.
    assert pays(2) and pays(2, launch_seconds=0.13) and not pays(2, launch_seconds=0.14)
    # Four groups hide another 0.1 s, and cost two more of each.
    assert pays(4, 2, launch_seconds=0.033) and not pays(4, 2, launch_seconds=0.034)
