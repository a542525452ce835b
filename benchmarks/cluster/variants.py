"""The variants that a cell compares: stock in its splits, the plugin's modes, and rules of other systems."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.cluster.cell import Cell
from benchmarks.cluster.rules import RULES
from benchmarks.modes import parse_mode
from xfuser_cocodiff.engine.compression.default_mode import EXACT, MODES
from xfuser_cocodiff.tools.simulation.sharding import ulysses_degrees
from xfuser_cocodiff.tools.simulation.step_time import rank_splits
from xfuser_cocodiff.xdit.settings.ring_placement import OUTER, UlyssesRingSplit

STOCK, BEST_STOCK, DEFAULT = "stock", "best_stock", "default"
BEST_MODES = {f"best_{mode}": mode for mode in MODES}
"""Modes of the plugin by the name that stands for the mode in its fastest split."""
DEFAULT_MODES = (BEST_STOCK, "exact", "best_exact", "balanced", "best_balanced", "fast", "best_fast")
"""What DEFAULT stands for; without the lossy modes where no axis is slow for the device, since they equal `exact`."""
_LARGEST_SLOWDOWN = 1.3
"""Simulated step time over the best one up to which a split of a mode is predicted from recorded steps. The simulator
is asked to be within 10 %, so that the fastest split is far inside."""


@dataclass(frozen=True)
class Variant:
    """One way to run the cell."""

    name: str
    """Name in reports."""
    split: UlyssesRingSplit
    rule: str = ""
    """Name of the rule that replaces stock's collectives; empty for the plugin."""
    mode: str = ""
    """The plugin's mode in the notation of :mod:`benchmarks.modes`; empty for rules."""

    @property
    def is_stock(self) -> bool:
        """Whether it is stock xDiT in some split."""
        return self.rule.startswith(STOCK)


def candidates(names: Sequence[str], variants: Sequence[Variant]) -> Mapping[str, list[str]]:
    """Return, for each name that stands for the fastest of several variants, their names."""
    found = {}
    for name in names:
        if name == BEST_STOCK:
            found[name] = [each.name for each in variants if each.is_stock]
        elif name in BEST_MODES:
            found[name] = [each.name for each in variants if each.mode == BEST_MODES[name]]
    return found


def expand(cell: Cell, names: Sequence[str]) -> list[str]:
    """Return names of variants, with DEFAULT replaced by those that it stands for in a cell."""
    return list(dict.fromkeys(each for name in names for each in (_applicable(cell) if name == DEFAULT else [name])))


def _applicable(cell: Cell) -> list[str]:
    """Return the default variants that differ from others in this cell."""
    lossless = (BEST_STOCK, EXACT, f"best_{EXACT}")
    return [name for name in DEFAULT_MODES if name in lossless or cell.profile.slow_axes]


def parse(cell: Cell, names: Sequence[str]) -> list[Variant]:
    """Return variants by name, after stock's flat Ulysses where the model's heads allow it.

    Args:
        cell: the cell.
        names: `best_stock` for all splits of stock, names of rules, or modes of the plugin such as 'balanced' or
            'exact/flat@v_first=on'. Rules and modes run in flat Ulysses where the heads allow it, else in the fastest
            split by the simulator. `best_exact` and so on stand for all other splits that may be the fastest of a mode,
            also those with zero-padded heads.

    Raises:
        ValueError: an unknown rule or mode, or a rule whose ring this cell does not have.
    """
    ranks, heads = cell.topology.size, cell.workload.heads
    flat, has_flat = UlyssesRingSplit(ranks, 1), heads % ranks == 0
    variants = [Variant(STOCK, flat, STOCK)] if has_flat else []
    for name in dict.fromkeys(names):
        if name == BEST_STOCK:
            variants += [each for each in _stock_splits(cell) if each.name not in {known.name for known in variants}]
        elif name in BEST_MODES:
            variants += _other_splits(cell, BEST_MODES[name], flat if has_flat else _fastest(cell, BEST_MODES[name]))
        elif name in RULES and name != STOCK:
            variants.append(_of_rule(cell, name, flat if has_flat else _fastest(cell, STOCK)))
        elif name != STOCK:
            mode = name.partition("@")[0].partition("/")[0]
            if mode not in MODES:
                valid = ", ".join((DEFAULT, BEST_STOCK, *BEST_MODES, *RULES, *MODES))
                raise ValueError(f"--modes {name!r} is not valid; valid are {valid}, and modes with options")
            parse_mode(name, cell.topology, flat)
            variants.append(Variant(name, flat if has_flat else _fastest(cell, mode), mode=name))
    return variants


def _stock_splits(cell: Cell) -> list[Variant]:
    """Return stock in each split, with Q, K and V in as many messages as the model has, and in three or one instead.

    Without a Ulysses group there are no such messages.
    """
    ranks, variants = cell.topology.size, []
    other = "stock-separate" if cell.workload.combines_qkv else "stock-combined"
    for degree in ulysses_degrees(cell.workload.heads, ranks):
        split = UlyssesRingSplit(degree, ranks // degree)
        name = f"{degree}x{ranks // degree}"
        variants.append(Variant(STOCK if degree == ranks else f"{STOCK} {name}", split, STOCK))
        if degree > 1:
            variants.append(Variant(f"{other} {name}", split, other))
    return variants


def _of_rule(cell: Cell, name: str, split: UlyssesRingSplit) -> Variant:
    within = cell.machine.ranks_per_node
    if RULES[name].needs_ring and cell.nodes == 1:
        raise ValueError(f"--modes {name!r} needs several nodes, for a ring across them")
    if RULES[name].needs_ring and cell.workload.heads % within == 0:
        split = UlyssesRingSplit(within, cell.nodes)
    return Variant(name, split, name)


def _fastest(cell: Cell, mode: str) -> UlyssesRingSplit:
    """Return the fastest split of a mode by the simulator, of those without zero-padded heads and in xDiT's order."""
    splits = [each.split for each in rank_splits(cell.scenario, mode)]
    return next(split for split in splits if cell.workload.heads % split.ulysses == 0 and split.placement == OUTER)


def _other_splits(cell: Cell, mode: str, usual: UlyssesRingSplit) -> list[Variant]:
    """Return a mode in the splits that may be faster than the usual one, by the simulator."""
    ranked = [each for each in rank_splits(cell.scenario, mode) if each.split.placement == OUTER]
    near = [each.split for each in ranked if each.cost <= _LARGEST_SLOWDOWN * ranked[0].cost]
    return [Variant(f"{mode} {each.ulysses}x{each.ring}", each, mode=mode) for each in near if each != usual]
