"""Exchanges by which a lossy mode crosses the slow axes in a split: its PSNR depends on them and on its codecs."""

from typing import Any

from xfuser_cocodiff.engine.compression.mode_names import EXACT, MODES, PAPER
from xfuser_cocodiff.engine.topology import planner
from xfuser_cocodiff.engine.topology.planner import SentSizes
from xfuser_cocodiff.engine.topology.plans import GATHER, HEADS, KV
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.lab.launching.single_rank import RING
from xfuser_cocodiff.lab.simulation.collectives import num_ranks_along
from xfuser_cocodiff.xdit.settings.ring_placement import UlyssesRingSplit


def coded_exchanges(cell: dict[str, Any], row: dict[str, Any], heads: tuple[int, int] | None = None) -> tuple[str, ...]:
    """Return the exchanges along slow axes whose messages a mode encodes; none for a lossless mode or a rule.

    Args:
        cell: cell of a record, or its `topology` and `slow_axes`.
        row: row of the cell, or its `variant` and `split`.
        heads: numbers of heads of Q and of K; when not given, as many, which are divisible by the ranks.

    Returns:
        Of plans.HEADS, plans.KV and single_rank.RING, as `cocodiff quality` names them.
    """
    main, *options = row["variant"].partition(" ")[0].split("@")
    mode, _, plan = main.partition("/")
    if mode not in MODES or mode == EXACT:
        return ()
    named = [each.partition("=")[2].split(";") for each in options if each.startswith("slow_axes=")]
    slow_axes = named[-1] if named else cell["slow_axes"]
    split = UlyssesRingSplit(row["split"]["ulysses"], row["split"]["ring"])
    full = Topology.parse(cell["topology"], split.ulysses * split.ring)
    group = split.ulysses_topology(full)
    found = []
    if num_ranks_along(group, slow_axes) > 1:
        if plan:
            gathers = GATHER in plan
        else:
            num_slow = num_ranks_along(group, slow_axes)
            can_gather = mode != PAPER and split.ring == 1
            sizes = SentSizes.of(*(heads or (group.size, group.size)), num_slow, group.size // num_slow)
            gathers = can_gather and planner.gathers_kv(num_slow, sizes)
        found.append(KV if gathers else HEADS)
    if num_ranks_along(split.ring_topology(full), slow_axes) > 1:
        found.append(RING)
    return tuple(found)
