"""The variants that a cell compares: stock in its splits, the plugin's modes, and rules of other systems."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.cluster.cell import Cell
from benchmarks.cluster.rules import COMBINED, RING_BYTES_PER_VALUE, RULES, SEPARATE, STOCK
from xfuser_cocodiff.engine.compression.default_mode import EXACT, MODES
from xfuser_cocodiff.tools.simulation.sharding import ulysses_degrees
from xfuser_cocodiff.tools.simulation.step_time import rank_splits
from xfuser_cocodiff.xdit.settings.ring_placement import OUTER, UlyssesRingSplit

BEST_STOCK, DEFAULT = "best_stock", "default"
MODE = "cocodiff_mode"
_ALONE = {"cocodiff_v_first": "off", "cocodiff_head_groups": "1"}
OPTIONS = {
    **{mode: {MODE: mode} for mode in MODES},
    "tapa": {MODE: EXACT, **_ALONE},
    "v-first": {MODE: EXACT, "cocodiff_a2a": "flat", "cocodiff_v_first": "on"},
    "v-major": {MODE: "paper", **_ALONE},
}
"""Options of the plugin by variant: its modes, and the paper's parts, of which TAPA is the hierarchical all-to-all."""
BEST_MODES = {f"best_{mode}": mode for mode in MODES}
"""Modes of the plugin by the name that stands for the mode in its fastest split."""
NAMES = (DEFAULT, BEST_STOCK, *BEST_MODES, *RULES, *OPTIONS)
"""All names of variants."""
DEFAULT_MODES = (BEST_STOCK, "exact", "best_exact", "balanced", "best_balanced", "fast", "best_fast")
"""What DEFAULT stands for; without the lossy modes where no axis is slow for the device, since they equal `exact`."""
_LARGEST_SLOWDOWN = 1.3
"""Simulated step time over the best one up to which a split of a mode is predicted from recorded steps. The simulator
is within 10 %, so the fastest split is far inside."""


@dataclass(frozen=True)
class Variant:
    """One way to run the cell."""

    name: str
    """Name in reports."""
    split: UlyssesRingSplit
    rule: str = ""
    """Name of the rule that replaces stock's collectives; empty for the plugin."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The plugin's options; none for rules."""


def candidates(names: Sequence[str], variants: Sequence[Variant]) -> Mapping[str, list[str]]:
    """Return, for each name that stands for the fastest of several variants, their names."""
    found = {}
    for name in names:
        if name == BEST_STOCK:
            found[name] = [each.name for each in variants if each.rule.startswith(STOCK)]
        elif name in BEST_MODES:
            found[name] = [each.name for each in variants if each.options == OPTIONS[BEST_MODES[name]]]
    return found


def expand(cell: Cell, names: Sequence[str]) -> list[str]:
    """Return names of variants, with DEFAULT replaced by those that differ from others in a cell."""
    lossless = (BEST_STOCK, EXACT, f"best_{EXACT}")
    default = [name for name in DEFAULT_MODES if name in lossless or cell.profile.slow_axes]
    return list(dict.fromkeys(each for name in names for each in (default if name == DEFAULT else [name])))


def parse(cell: Cell, names: Sequence[str]) -> list[Variant]:
    """Return variants by name, after stock's flat Ulysses where the model's heads allow it.

    Args:
        cell: the cell.
        names: of NAMES. `best_stock` stands for all splits of stock. Rules and modes run in flat Ulysses where the
            heads allow it, else in the fastest split by the simulator. `best_exact` and so on stand for all other
            splits that may be the fastest of a mode, also those with zero-padded heads.
    """
    flat = UlyssesRingSplit(cell.topology.size, 1)
    has_flat = cell.workload.heads % flat.ulysses == 0
    variants = [Variant(STOCK, flat, STOCK)] if has_flat else []
    for name in dict.fromkeys(names):
        if name == BEST_STOCK:
            variants += [each for each in _stock_splits(cell) if each.name not in {known.name for known in variants}]
        elif name in BEST_MODES:
            variants += _other_splits(cell, BEST_MODES[name], flat if has_flat else _fastest(cell, BEST_MODES[name]))
        elif name in OPTIONS:
            split = flat if has_flat else _fastest(cell, OPTIONS[name][MODE])
            variants.append(Variant(name, split, options=OPTIONS[name]))
        elif name != STOCK:
            is_flat = has_flat and name not in RING_BYTES_PER_VALUE
            variants.append(Variant(name, flat if is_flat else _fastest(cell, STOCK), name))
    return variants


def _stock_splits(cell: Cell) -> list[Variant]:
    """Return stock in each split, with Q, K and V in as many messages as the model has, and in three or one instead.

    Without a Ulysses group there are no such messages.
    """
    ranks, variants = cell.topology.size, []
    other = SEPARATE if cell.workload.combines_qkv else COMBINED
    for degree in ulysses_degrees(cell.workload.heads, ranks):
        split = UlyssesRingSplit(degree, ranks // degree)
        name = f"{degree}x{ranks // degree}"
        variants.append(Variant(STOCK if degree == ranks else f"{STOCK} {name}", split, STOCK))
        if degree > 1:
            variants.append(Variant(f"{other} {name}", split, other))
    return variants


def _fastest(cell: Cell, mode: str) -> UlyssesRingSplit:
    """Return the fastest split of a mode by the simulator, of those without zero-padded heads and in xDiT's order."""
    splits = [each.split for each in rank_splits(cell.scenario, mode)]
    return next(split for split in splits if cell.workload.heads % split.ulysses == 0 and split.placement == OUTER)


def _other_splits(cell: Cell, mode: str, usual: UlyssesRingSplit) -> list[Variant]:
    """Return a mode in the splits that may be faster than the usual one, by the simulator."""
    ranked = [each for each in rank_splits(cell.scenario, mode) if each.split.placement == OUTER]
    near = [each.split for each in ranked if each.cost <= _LARGEST_SLOWDOWN * ranked[0].cost]
    return [
        Variant(f"{mode} {each.ulysses}x{each.ring}", each, options=OPTIONS[mode]) for each in near if each != usual
    ]
