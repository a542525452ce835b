"""The variants that a cell compares: stock in its splits, the plugin's modes, and rules of other systems."""

from collections.abc import Sequence
from dataclasses import dataclass

from xfuser_cocodiff.engine.compression.mode_names import MODES
from xfuser_cocodiff.lab.cluster_bench.cell import Cell
from xfuser_cocodiff.lab.cluster_bench.rules import RULES, Rule
from xfuser_cocodiff.lab.cluster_bench.stock_splits import LARGEST_SLOWDOWN, divide, rank_stock_splits
from xfuser_cocodiff.lab.simulation.step_time import rank_splits
from xfuser_cocodiff.xdit.settings.ring_placement import OUTER, UlyssesRingSplit

STOCK, BEST_STOCK = "stock", "best_stock"
BEST_MODES = {f"best_{mode}": mode for mode in MODES}
"""Modes of the plugin by the name that stands for the mode in its fastest split."""
_STOCK_RULES = ("stock-combined", "stock-separate")
"""How stock sends Q, K and V; the faster one counts as best stock."""


@dataclass(frozen=True)
class Variant:
    """One way to run the cell."""

    name: str
    """Name in reports."""
    split: UlyssesRingSplit
    rule: Rule | None = None
    """Rule that replaces stock's collectives; None for the plugin."""
    mode: str = ""
    """The plugin's mode in the notation of `bench model --mode`; empty for rules."""
    is_other_split: bool = False
    """Whether it is a mode in another split than stock's, of which only the fastest one is measured."""

    @property
    def is_stock(self) -> bool:
        """Whether it is stock xDiT in some split."""
        return self.rule is not None and self.rule.name in (STOCK, *_STOCK_RULES)


def parse(cell: Cell, names: Sequence[str]) -> list[Variant]:
    """Return variants by name, after stock's flat Ulysses where the model's heads allow it.

    Args:
        cell: the cell.
        names: `best_stock` for all splits of stock that may be the fastest, names of rules, or modes of the plugin such
            as 'balanced' or 'exact/flat@v_first=on'. Rules and modes run in flat Ulysses where the heads allow it, else
            in the fastest split by the simulator. `best_exact` and so on stand for all other splits that may be the
            fastest of a mode, also those with zero-padded heads.

    Raises:
        ValueError: an unknown rule or mode, or a rule whose ring this cell does not have.
    """
    ranks = cell.topology.size
    flat = UlyssesRingSplit(ranks, 1)
    has_flat = cell.workload.heads % ranks == 0
    variants = [Variant(STOCK, flat, RULES[STOCK])] if has_flat else []
    for name in dict.fromkeys(names):
        if name == STOCK:
            continue
        if name == BEST_STOCK:
            variants += _stock_splits(cell)
        elif name in BEST_MODES:
            variants += _other_splits(cell, BEST_MODES[name], flat if has_flat else _fastest(cell, BEST_MODES[name]))
        elif name in RULES:
            variants.append(_of_rule(cell, RULES[name], flat if has_flat else _fastest(cell, STOCK)))
        else:
            mode = name.partition("@")[0].partition("/")[0]
            split = flat if has_flat else _fastest(cell, mode)
            variants.append(Variant(name, split, mode=name))
    return variants


def _of_rule(cell: Cell, rule: Rule, split: UlyssesRingSplit) -> Variant:
    if rule.plugin_variant:
        return Variant(rule.name, split, mode=rule.plugin_variant)
    if not rule.needs_ring:
        return Variant(rule.name, split, rule)
    if cell.nodes == 1:
        raise ValueError(f"rule {rule.name!r} needs several nodes, for a ring across them")
    within = cell.machine.ranks_per_node
    if cell.workload.heads % within:
        return Variant(rule.name, _fastest(cell, STOCK), rule)
    return Variant(rule.name, UlyssesRingSplit(within, cell.nodes), rule)


def _fastest(cell: Cell, mode: str) -> UlyssesRingSplit:
    """Return the fastest split of a mode by the simulator, of those without zero-padded heads and in xDiT's order."""
    splits = [each.split for each in rank_splits(cell.scenario, mode)]
    return next(split for split in splits if cell.workload.heads % split.ulysses == 0 and split.placement == OUTER)


def _other_splits(cell: Cell, mode: str, usual: UlyssesRingSplit) -> list[Variant]:
    """Return a mode in the splits that may be faster than the usual one, by the simulator."""
    ranked = [each for each in rank_splits(cell.scenario, mode) if each.split.placement == OUTER]
    near = [each.split for each in ranked if each.cost <= LARGEST_SLOWDOWN * ranked[0].cost]
    return [
        Variant(f"{mode} {split.ulysses}x{split.ring}", split, mode=mode, is_other_split=True)
        for split in near
        if split != usual
    ]


def _stock_splits(cell: Cell) -> list[Variant]:
    """Return the splits of stock that may be the fastest, with Q, K and V in one message or in three."""
    measured, _ = divide(rank_stock_splits(cell.scenario))
    return [
        Variant(f"{rule} {each.split.ulysses}x{each.split.ring}", each.split, RULES[rule])
        for each in measured
        for rule in _STOCK_RULES
    ]
