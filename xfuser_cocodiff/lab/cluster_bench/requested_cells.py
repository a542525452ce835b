"""The cells that a command asks for, and the variants that apply to each."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from xfuser_cocodiff.engine.compression.mode_names import EXACT, MODES
from xfuser_cocodiff.engine.compression.modes import PRESETS, CodecSchedule
from xfuser_cocodiff.lab.bench.variant import parse_mode
from xfuser_cocodiff.lab.cluster_bench import variants
from xfuser_cocodiff.lab.cluster_bench.cell import Cell
from xfuser_cocodiff.lab.cluster_bench.rules import RULES
from xfuser_cocodiff.lab.cluster_bench.speed_choice import dilations
from xfuser_cocodiff.lab.cluster_bench.variants import Variant
from xfuser_cocodiff.lab.simulation import assumed_change
from xfuser_cocodiff.lab.simulation.machines import MACHINES, Machine
from xfuser_cocodiff.lab.simulation.plan_model import ALIASES as MODEL_ALIASES
from xfuser_cocodiff.lab.simulation.plan_model import check_choice, check_count
from xfuser_cocodiff.lab.simulation.workloads import PIXELS_PER_TOKEN, WORKLOADS
from xfuser_cocodiff.xdit.settings.ring_placement import UlyssesRingSplit

DEFAULT = "default"
"""Name that stands for all variants of :data:`DEFAULT_MODES` that apply to a cell."""
DEFAULT_MODES = (
    *(variants.BEST_STOCK, "exact", "best_exact", "balanced", "best_balanced", "fast", "paper"),
    *("v-first", "fp8", "fp4", "int8", "kv-gather", "compact-ring"),
)
MAX_RANKS = 32
"""Ranks that are emulated at most; 24 ranks on two cores meet the rates of their links."""


@dataclass(frozen=True)
class RequestedCell:
    """A cell with its variants."""

    cell: Cell
    modes: tuple[str, ...]
    """Names from which the variants were parsed."""
    variants: tuple[Variant, ...]
    problem: str | None = None
    """Why xDiT cannot run this cell; None if it can."""


def parse_cells(
    machines: str,
    nodes: str,
    models: str,
    resolutions: str,
    batch: int = 1,
    layers: int = 1,
    launch_us: float | None = None,
    text_tokens: int | None = None,
) -> list[Cell]:
    """Return the cells of all combinations of comma-separated options; resolutions vary fastest.

    Args:
        machines: names in :data:`machines.MACHINES`, or aliases.
        nodes: numbers of nodes.
        models: names in :data:`workloads.WORKLOADS`, or short names.
        resolutions: pixels per side, or rows of a video.
        batch: number of images.
        layers: blocks of each kind that are emulated.
        launch_us: host time of a kernel launch in microseconds; None for that of the accelerator.
        text_tokens: text tokens of the prompt; None for those of the pipeline.

    Raises:
        ValueError: an option is not valid.
    """
    check_count("--batch", batch)
    check_count("--layers", layers)
    if text_tokens is not None:
        check_count("--text_tokens", text_tokens)
    if launch_us is not None and not 0 <= launch_us < float("inf"):
        raise ValueError(f"--launch_us {launch_us:g} is not valid; valid are microseconds from 0")
    used = [_machine(name, launch_us) for name in _names("--machine", machines, MACHINES, ())]
    workloads = [MODEL_ALIASES.get(name, name) for name in _names("--model", models, WORKLOADS, MODEL_ALIASES)]
    if text_tokens and (without := [name for name in workloads if not WORKLOADS[name].text_tokens]):
        raise ValueError(f"--text_tokens {text_tokens} is not valid: the sequence of {without[0]} has no text")
    counts, sizes = _counts("--nodes", nodes), _counts("--resolution", resolutions, PIXELS_PER_TOKEN)
    return [
        Cell(machine, count, model, size, batch, layers, text_tokens)
        for machine in used
        for count in counts
        for model in workloads
        for size in sizes
    ]


def request(
    cells: Iterable[Cell], modes: str | None, predicts: bool, dilation: float | None = None
) -> list[RequestedCell]:
    """Return the cells with their variants.

    Args:
        cells: the cells.
        modes: names of variants, separated by commas; DEFAULT, or None, for those of :data:`DEFAULT_MODES` that apply
            to a cell.
        predicts: whether nothing is emulated, so that the number of ranks is not limited.
        dilation: requested dilation; None if it is chosen.

    Raises:
        ValueError: a variant or the dilation is not valid in a cell, a cell has too many ranks, or xDiT can run none of
            the cells.
    """
    requested = [_request(cell, modes, predicts) for cell in cells]
    for each in requested:
        lowest, highest = dilations(each.cell)
        if dilation is not None and not lowest <= dilation <= highest:
            raise ValueError(
                f"--dilation {dilation:g} is not valid for {each.cell.nodes} nodes of {each.cell.machine.name}; valid "
                f"are {lowest:.4g} to {highest:.4g}"
            )
    if all(each.problem for each in requested):
        cell, problem = requested[0].cell, requested[0].problem
        raise ValueError(
            f"--model {cell.model} with --resolution {cell.resolution} and --nodes {cell.nodes} is not valid on "
            f"{cell.machine.name}: {problem}"
        )
    return requested


def add_modes(requested: RequestedCell, modes: Iterable[str]) -> RequestedCell:
    """Return a cell with the variants of an earlier record of it before its own."""
    names = tuple(dict.fromkeys((*modes, *requested.modes)))
    return replace(requested, modes=names, variants=tuple(variants.parse(requested.cell, names)))


def _request(cell: Cell, modes: str | None, predicts: bool) -> RequestedCell:
    ranks = cell.topology.size
    if not predicts and ranks > MAX_RANKS:
        valid = ", ".join(map(str, range(1, MAX_RANKS // cell.machine.ranks_per_node + 1)))
        raise ValueError(
            f"--nodes {cell.nodes} is not valid: {ranks} ranks of {cell.machine.name} are too many to be emulated; "
            f"valid are {valid}, or more with --predict"
        )
    if ranks < 2:
        raise ValueError(f"--nodes {cell.nodes} is not valid: {cell.machine.name} has a single rank")
    names = _expand(cell, [name.strip() for name in (modes or DEFAULT).split(",")])
    for name in names:
        _check(cell, name)
    shard = cell.scenario.shard
    # The plugin can run what a remark names, but stock cannot.
    problem = shard.problem or next((remark for remark in shard.remarks if "xDiT fails" in remark), None)
    return RequestedCell(cell, tuple(names), tuple(variants.parse(cell, names)), problem)


def _expand(cell: Cell, names: Sequence[str]) -> list[str]:
    """Replace DEFAULT by the variants that it stands for."""
    return [each for name in names for each in (_applicable(cell) if name == DEFAULT else [name])]


def _applicable(cell: Cell) -> list[str]:
    """Return the default variants that differ from others in this cell.

    Lossy modes appear with the slow axes that are the default, if there are any, and with those of the machine.
    """
    topology = cell.topology
    sizes = {axis.name: axis.size for axis in topology.axes}
    slow_axes = [name for name in cell.machine.slow_axes if sizes.get(name, 1) > 1]
    by_default = cell.profile.slow_axes
    names = []
    for name in DEFAULT_MODES:
        if name in RULES and RULES[name].needs_ring and cell.nodes == 1:
            continue
        mode = variants.BEST_MODES.get(name, name)
        is_lossy = mode in MODES and mode != EXACT
        if not is_lossy or by_default:
            names.append(name)
        if is_lossy and name == mode and slow_axes and {*slow_axes} != {*by_default}:
            names.append(f"{name}@slow_axes={';'.join(slow_axes)}")
    return names


def _check(cell: Cell, name: str) -> None:
    """Check the name of a variant.

    Raises:
        ValueError: it is not valid in this cell.
    """
    if name in RULES:
        if RULES[name].needs_ring and cell.nodes == 1:
            valid = ", ".join(each for each, rule in RULES.items() if not rule.needs_ring)
            raise ValueError(f"--modes {name!r} needs several nodes, for a ring across them; valid rules are {valid}")
        return
    mode = name.partition("@")[0].partition("/")[0]
    if mode not in MODES and name not in (variants.BEST_STOCK, *variants.BEST_MODES):
        valid = ", ".join((DEFAULT, variants.BEST_STOCK, *variants.BEST_MODES, *RULES, *MODES))
        raise ValueError(f"--modes {name!r} is not valid; valid are {valid}, and modes with options")
    if mode in MODES:
        config = parse_mode(name, cell.topology, UlyssesRingSplit(cell.topology.size, 1))
        if mode in PRESETS and config.schedule:
            schedule = CodecSchedule.parse(config.schedule, PRESETS[mode])
            if all(map(schedule.is_keyframe_step, range(assumed_change.STEPS))):
                raise ValueError(f"--modes {name!r} is not valid: all {assumed_change.STEPS} steps are keyframes")


def _machine(name: str, launch_us: float | None) -> Machine:
    machine = MACHINES[name]
    if launch_us is None:
        return machine
    return replace(machine, accelerator=replace(machine.accelerator, launch_seconds=1e-6 * launch_us))


def _names(option: str, text: str, valid: Iterable[str], aliases: Iterable[str]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        check_choice(option, name, [*valid, *aliases])
    return list(dict.fromkeys(names))


def _counts(option: str, text: str, multiple: int = 1) -> Sequence[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ValueError(f"{option} {text!r} is not valid; it must be integers separated by commas")
    for part in parts:
        check_count(option, int(part), multiple)
    return list(dict.fromkeys(map(int, parts)))
