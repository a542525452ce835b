"""Provides the record of `cocodiff plan` for message sizes: chosen all-to-all plans and their predicted times."""

from collections.abc import Sequence
from typing import Any

from xfuser_cocodiff.engine.compression.mode_names import MULTI_NODE_MODE
from xfuser_cocodiff.engine.topology import planner
from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.planner import SentSizes
from xfuser_cocodiff.engine.topology.plans import Plan, candidates
from xfuser_cocodiff.lab.reporting import host
from xfuser_cocodiff.lab.simulation import exchange
from xfuser_cocodiff.lab.simulation.collectives import num_ranks_along

_NUM_ALTERNATIVES = 3

_SIZES = SentSizes(1, 1, 1)
"""Sizes of Q and K with as many heads and tokens."""


def forecast(profile: Profile, sizes: Sequence[int]) -> dict[str, Any]:
    """Return the record: for each size, predicted times of the chosen plan, the flat plan and the best alternatives.

    Args:
        profile: link profile of the ranks.
        sizes: bytes per rank.
    """
    rows = []
    for size in sizes:
        chosen, flat = planner.choose_plan(profile, size), Plan.flat(profile.topology)
        seconds = {plan: planner.all_to_all_seconds(profile, plan, size) for plan in candidates(profile.topology)}
        best = sorted(seconds, key=seconds.__getitem__)[:_NUM_ALTERNATIVES]
        rows += [
            {"bytes_per_rank": size, "plan": str(plan), "predicted_seconds": seconds[plan], "chosen": plan == chosen}
            for plan in dict.fromkeys((chosen, flat, *best))
        ]
    return {
        **host.header(),
        "topology": str(profile.topology),
        "profile": profile.to_json(),
        "slow_axes": list(profile.slow_axes),
        "exchange": _exchange(profile),
        "exchange_reason": exchange.lossy_reason(
            profile.topology, profile.slow_axes, _SIZES, MULTI_NODE_MODE, has_ring=False
        ),
        "rows": rows,
    }


def _exchange(profile: Profile) -> dict[str, str]:
    """Return how coded attention with as many heads of K and V as of Q crosses each axis, without a ring."""
    topology, slow = profile.topology, profile.slow_axes
    gathers = planner.gathers_kv(num_ranks_along(topology, slow), _SIZES)
    return exchange.by_axis(topology, slow if gathers else ())


def show(record: dict[str, Any]) -> None:
    """Print the plans of each size, the chosen one first."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    for column, justify in (("bytes per rank", "right"), ("plan", "left"), ("predicted ms", "right"), ("", "left")):
        table.add_column(column, justify=justify)
    for row in record["rows"]:
        predicted = f"{1000 * row['predicted_seconds']:.3f}"
        table.add_row(f"{row['bytes_per_rank']:,}", row["plan"], predicted, "chosen" if row["chosen"] else "")
    Console(highlight=False, markup=False).print(f"topology {record['topology']}", table)
    if record["exchange_reason"]:
        print(f"exchange in modes balanced and fast, for as many K/V heads as Q heads: {record['exchange_reason']}")
