"""Short names of a record's rows for tables and pictures, instead of the notation of `--modes`."""

from xfuser_cocodiff.engine.compression.mode_names import MODES
from xfuser_cocodiff.lab.cluster_bench.rules import RULES
from xfuser_cocodiff.lab.cluster_bench.variants import BEST_MODES, BEST_STOCK

TAPA = "exact@v_first=off@head_groups=1"
"""The hierarchical all-to-all alone, without V-First and head groups."""
TAPA_AND_V_MAJOR = "paper@v_first=off@head_groups=1"
_NAMES = {
    BEST_STOCK: "best stock",
    TAPA: "hierarchical all-to-all alone",
    TAPA_AND_V_MAJOR: "V-Major without V-First",
    "paper": "V-Major (paper)",
    **{best: f"{mode}, fastest split" for best, mode in BEST_MODES.items()},
    "best_paper": "V-Major (paper), fastest split",
}
_FLAGS = {
    "v_first=off": "no V-First",
    "v_first=on": "V-First",
    "head_groups=1": "one head group",
}
_MODELS = {
    "flux.1-dev": "FLUX.1",
    "flux.2-dev": "FLUX.2",
    "sd3.5-large": "SD3.5",
    "qwen-image": "Qwen-Image",
    "hunyuanvideo": "HunyuanVideo",
    "wan2.1-14b": "Wan2.1",
}


def model_name(model: str) -> str:
    """Return the name of a model for readers, given its name in a record."""
    return _MODELS.get(model, model)


def format_count(count: int, noun: str) -> str:
    """Return a count with its noun, such as '2 nodes'."""
    return f"{count} {noun}{'s' * (count != 1)}"


def row_name(mode: str) -> str:
    """Return the name of a row for readers.

    Args:
        mode: its `mode` in a record, such as 'best_exact', 'fp4' or 'balanced@slow_axes=gpu'.
    """
    if mode in _NAMES:
        return _NAMES[mode]
    name, _, split = mode.partition(" ")
    if name in RULES:
        return f"{RULES[name].label}, {split}" if split else RULES[name].label
    main, *options = name.split("@")
    own, _, plan = main.partition("/")
    parts = [row_name(own) if own != name else own, *([f"plan {plan.replace(';', ',')}"] if plan else [])]
    parts += [_option_name(each) for each in options]
    return ", ".join([*parts, *([split] if split else [])])


def is_frontier_row(mode: str) -> bool:
    """Return whether a row belongs to the comparison of speed and fidelity.

    These are stock, other systems and modes of the plugin, but not single splits or modes with a feature switched off.
    """
    if mode in RULES or mode == BEST_STOCK or mode in BEST_MODES:
        return True
    main, *options = mode.split("@")
    return main in MODES and all(each.startswith(("slow_axes=", "schedule=")) for each in options)


def _option_name(option: str) -> str:
    key, _, value = option.partition("=")
    values = value.replace(";", ", ")
    if key == "slow_axes":
        return f"slow {values}"
    if key == "head_groups" and option not in _FLAGS:
        return f"{values} head groups"
    return _FLAGS.get(option, values)
