"""What the user asked for: flags and environment become one frozen, validated record."""

import contextlib
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xfuser_cocodiff.engine import kernels
from xfuser_cocodiff.engine.compression import bit_allocation, modes
from xfuser_cocodiff.engine.compression.modes import CodecSchedule
from xfuser_cocodiff.engine.compression.reference_memory import GIB
from xfuser_cocodiff.engine.settings.options import (
    AUTO,
    EXACT,
    LOG_LEVEL_VARIABLE,
    LOG_LEVELS,
    MODES,
    MULTI_NODE_MODE,
    OFF,
    OPTIONS,
    OVERLAPS,
    RECORD_VARIABLE,
    Option,
)
from xfuser_cocodiff.engine.settings.ring_placement import (
    OUTER,
    PLACEMENTS,
    GroupPlacement,
    SequenceRanks,
    has_nodes,
    place_groups,
)
from xfuser_cocodiff.engine.topology import launcher
from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import AXIS_NAMES, FLAT, Topology

_CACHE = next(option for option in OPTIONS if option.field == "cocodiff_cache")
MAX_SECONDS = 1e8
"""Of a timeout: three years, which every backend can count."""
MEASURED_SLOW_AXES = (AUTO,)
"""Slow axes that are those along which a rank sends slowly: all ranks agree on them once links are known."""
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


@dataclass(frozen=True)
class Overlap:
    """What the user fixed of how exchanges overlap with computation; None is left to a trial."""

    v_first: bool | None = None
    """Whether V's exchange starts before Q and K are there."""
    head_groups: int | None = None
    """Groups of a rank's heads."""


@dataclass(frozen=True, kw_only=True)
class CocoDiffConfig:
    """The plugin's settings for one engine, the same on every rank."""

    topology: Topology
    """Levels of every Ulysses group."""

    ring: str = OUTER
    """Where the ring lies: one of PLACEMENTS."""

    ring_topology: Topology | None = None
    """Levels of every ring; None where there is none."""

    ring_profile: Profile | None = None
    """As `profile`, for the links of a ring."""

    plan: Plan | None = None
    """How the all-to-all runs; None leaves it to the planner."""

    profile: Profile | None = None
    """What the planner goes by; None lets it probe the links."""

    timeout: float | None = None
    """Seconds that a collective may take; None is torch's default."""

    overlap: Overlap = Overlap()
    """What overlaps with computation."""

    mode: str = EXACT
    """One of MODES."""

    schedule: str | None = None
    """Changes to the mode's schedule."""

    slow_axes: tuple[str, ...] = ()
    """Names of the axes on which a lossy mode may approximate; MEASURED_SLOW_AXES leaves it to the link probe."""

    virtual: Topology | None = None
    """Of ranks that one rank stands for."""

    virtual_ring: bool = False
    """Whether these are a ring, and not a Ulysses group."""

    max_error: float | None = None
    """Relative error above which a step is followed by an exact one."""

    memory_budget: int | None = None
    """Bytes that references may take on each rank."""

    kernels: str = AUTO
    """One of kernels.CHOICES."""

    synchronous: bool = False
    """Whether the machine is told to run collectives one by one (CCL_OP_SYNC): on an accelerator nothing is hidden."""

    cache: Path | None = None
    """Folder that keeps what is found of the machine; None keeps nothing."""

    detected: bool = False
    """Whether the topology was read from the launcher rather than given."""

    def __post_init__(self) -> None:
        _check_choice("cocodiff_mode", self.mode, MODES)


def resolve(
    values: Mapping[str, Any],
    environment: Mapping[str, str],
    ranks: SequenceRanks,
    device_type: str = "cuda",
) -> CocoDiffConfig | None:
    """Combine flags and environment variables; flags win.

    Args:
        values: option fields as parsed; None or False means not given.
        environment: process environment, read for the COCODIFF_ variables of OPTIONS and for oneCCL's CCL_OP_SYNC.
        ranks: those that share a sequence.
        device_type: where this rank's tensors lie, as PyTorch names it.

    Returns:
        The settings, or None when the plugin is not asked for.

    Raises:
        ValueError: names the flag or variable, its value and what is valid.
    """
    chosen = {option.field: _choose(option, values, environment) for option in OPTIONS}
    use, source = chosen["use_cocodiff"]
    if not _as_bool(use, source):
        return None
    mode, source = chosen["cocodiff_mode"]
    _check_choice(source, mode or EXACT, MODES)
    virtual, is_ring = _read(chosen["cocodiff_virtual"], lambda text: _virtual(text, ranks.whole)) or (None, False)
    ring, source = chosen["cocodiff_ring"]
    _check_choice(source, ring := ring or OUTER, PLACEMENTS)
    ground = _ground(chosen, ranks, ring, source)
    topology = ground.topology
    slow = _read(
        (chosen["cocodiff_slow_axes"][0] or "", chosen["cocodiff_slow_axes"][1]),
        lambda text: parse_slow_axes(
            text, virtual or topology, None if virtual else ground.ring_topology, bool(virtual)
        ),
    )
    if virtual and slow == MEASURED_SLOW_AXES and not chosen["cocodiff_profile"][0]:
        source = chosen["cocodiff_slow_axes"][1]
        raise ValueError(f"{source}: {AUTO!r} is not valid: with --cocodiff_virtual it needs --cocodiff_profile")
    is_tuned = (chosen["cocodiff_schedule"][0] or "").startswith("@")
    across = has_nodes(ranks.full_topology or ranks.detected) and slow
    mode = mode or (MULTI_NODE_MODE if virtual or is_tuned or across else EXACT)
    v_first, source = chosen["cocodiff_v_first"]
    _check_choice(source, v_first or AUTO, OVERLAPS)
    overlap = Overlap(
        v_first={"on": True, "off": False}.get(v_first), head_groups=_read(chosen["cocodiff_head_groups"], _head_groups)
    )
    return CocoDiffConfig(
        topology=topology,
        plan=_read(chosen["cocodiff_a2a"], lambda text: _plan(text, topology)),
        ring=ring,
        ring_topology=ground.ring_topology,
        ring_profile=ground.ring_profile,
        profile=ground.profile
        if ground.profile or ground.ring_profile  # which alone is there where the ring is all there is
        else _read(chosen["cocodiff_profile"], lambda text: _profile(text, virtual or topology, ranks)),
        timeout=_read(chosen["cocodiff_timeout"], _seconds),
        overlap=overlap,
        mode=mode,
        schedule=_read(chosen["cocodiff_schedule"], lambda text: _schedule(text, mode, values.get("model"))),
        slow_axes=slow,
        virtual=virtual,
        virtual_ring=is_ring,
        max_error=_read(chosen["cocodiff_max_error"], _error),
        memory_budget=_read(chosen["cocodiff_memory_budget"], _gib),
        kernels=_read(chosen["cocodiff_kernels"], lambda text: _kernels(text, device_type)) or AUTO,
        synchronous=launcher.collectives_are_synchronous(environment),
        cache=_read(chosen[_CACHE.field], _cache) if chosen[_CACHE.field][0] else cache_folder(environment),
        detected=chosen["cocodiff_topology"][0] is None,
    )


def _ground(chosen: Mapping[str, tuple[Any, str]], ranks: SequenceRanks, ring: str, source: str) -> GroupPlacement:
    given = _read(chosen["cocodiff_topology"], lambda text: _topology(text, ranks))
    profile = _read(chosen["cocodiff_profile"], lambda text: Profile.read(Path(text)))
    return _read((ring, source), lambda ring: place_groups(ranks, given, ring, profile))


def _topology(text: str, ranks: SequenceRanks) -> Topology:
    """Of a Ulysses group, or of all ranks."""
    if ranks.ring > 1 and text.strip() != FLAT and Topology.parse(text).size == ranks.whole:
        return Topology.parse(text)
    return Topology.parse(text, ranks.ulysses)


def default_mode(detected: Topology) -> str:
    """The mode for which none is given, by where the ranks lie that share a sequence."""
    return MULTI_NODE_MODE if has_nodes(detected) else EXACT


def _read(chosen: tuple[Any, str], parse: Callable[[Any], Any]) -> Any:
    """A value by its parser, whose error then names the source; None where none was given."""
    value, source = chosen
    try:
        return None if value is None else parse(value)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def _plan(text: str, topology: Topology) -> Plan | None:
    if text == AUTO:
        return None
    try:
        return Plan.parse(text, topology)
    except ValueError as error:
        raise ValueError(f"{error}, or {AUTO!r}") from None


def _profile(text: str, topology: Topology, ranks: SequenceRanks) -> Profile:
    profile = Profile.read(Path(text))
    if profile.topology != topology:
        beside = f", and {ranks.full_topology} with its rings" if ranks.ring > 1 else ""
        raise ValueError(
            f"the profile {text!r} is of the topology {profile.topology}, this run has {topology}{beside}; "
            "--cocodiff_topology can say that they are the same"
        )
    return profile


def _schedule(text: str, mode: str, model: str | None) -> str:
    usual = modes.usual(mode, None)
    if usual is None:
        raise ValueError(
            f"{text!r} has no effect in the mode {EXACT}; valid are --cocodiff_mode {', '.join(MODES[1:])}"
        )
    schedule = CodecSchedule.parse(text, usual)
    if schedule.allotment is None:
        return text
    if model:
        schedule.allotment.check_model(model)
    file, comma, changes = text.partition(",")
    return f"{bit_allocation.signed(file)}{comma}{changes}"


def _virtual(text: str, degree: int) -> tuple[Topology, bool]:
    if degree > 1:
        raise ValueError(f"{text!r} is for one rank that stands for many; valid with it is --ulysses_degree 1")
    return parse_virtual_ranks(text)


def parse_virtual_ranks(text: str) -> tuple[Topology, bool]:
    """Read '2x2' or 'ring:2x2': the topology of virtual ranks, and whether they are a ring.

    Raises:
        ValueError: not the notation.
    """
    return Topology.parse(text.removeprefix(_RING)), text.startswith(_RING)


_RING = "ring:"


def parse_slow_axes(text: str, topology: Topology, ring: Topology | None, is_virtual: bool = False) -> tuple[str, ...]:
    """Return the axes on which a mode may approximate: by default those between nodes, of virtual ranks all but the
    innermost one that has several places.

    Args:
        text: what the user gave: names, 'auto', or nothing.
        topology: of a Ulysses group, or of virtual ranks.
        ring: of a ring, if there is one.
        is_virtual: whether ranks are virtual.

    Raises:
        ValueError: a name that neither topology has.
    """
    axes = [axis for each in (topology, ring) if each for axis in each.axes]
    moving = tuple(dict.fromkeys(axis.name for axis in axes if axis.size > 1))
    if not text:
        return (moving[:-1] or moving) if is_virtual else tuple(name for name in moving if name == AXIS_NAMES[0])
    if text == AUTO:
        return MEASURED_SLOW_AXES
    found, known = tuple(name.strip() for name in text.split(",")), dict.fromkeys(axis.name for axis in axes)
    if not set(found) <= set(known):
        around = f" and of its rings, {ring}," if ring else ""
        raise ValueError(
            f"{text!r} is not valid; valid are {AUTO!r} and axes of the topology {topology}{around} {', '.join(known)}"
        )
    return found


def cache_folder(environment: Mapping[str, str]) -> Path | None:
    """The folder that keeps what is found of the machine, as variables have it; None where nothing is kept."""
    if text := environment.get(_CACHE.variable):
        return _cache(text)
    try:
        return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache", "cocodiff")
    except RuntimeError:  # a user without a home, as in some containers
        return None


def _cache(text: str) -> Path | None:
    if text != OFF and Path(text).exists() and not Path(text).is_dir():
        raise ValueError(f"{text!r} is not valid; valid are a folder and {OFF!r}")
    return None if text == OFF else Path(text)


def check_variables(environment: Mapping[str, str]) -> None:
    """Check the variables that are not options, before a run depends on them.

    Raises:
        ValueError: names the variable, its value and the valid set.
    """
    level = environment.get(LOG_LEVEL_VARIABLE)
    if level and level.lower() not in LOG_LEVELS:
        raise ValueError(f"{LOG_LEVEL_VARIABLE}: {level!r} is not valid; valid are {', '.join(LOG_LEVELS)}")
    _make_record_folder(environment.get(RECORD_VARIABLE))


def _make_record_folder(text: str | None) -> None:
    if not text:
        return
    with contextlib.suppress(OSError):
        Path(text).mkdir(parents=True, exist_ok=True)
    if not (Path(text).is_dir() and os.access(text, os.W_OK | os.X_OK)):
        raise ValueError(f"{RECORD_VARIABLE}: {text!r} is not valid; valid are folders that can be written to")


def _seconds(text: str) -> float:
    return _positive(text, f"seconds above 0, up to {MAX_SECONDS:g}", MAX_SECONDS)


def _error(text: str) -> float:
    return _positive(text, "numbers above 0, such as 0.05")


def _gib(text: str) -> int:
    return int(_positive(text, "GiB above 0, such as 2.5") * GIB)


def _kernels(text: str, device_type: str) -> str:
    if text not in kernels.CHOICES:
        raise ValueError(f"{text!r} is not valid; valid are {', '.join(kernels.CHOICES)}")
    kernels.resolved(text, device_type)  # whether it can be had
    return text


def _positive(text: str, valid: str, most: float = sys.float_info.max) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= most:
        raise ValueError(f"{text!r} is not valid; valid are {valid}")
    return value


def _head_groups(text: str) -> int | None:
    if text == AUTO:
        return None
    if not (str(text).isdecimal() and int(text) >= 1):
        raise ValueError(f"{text!r} is not valid; valid are {AUTO!r} and numbers from 1")
    return int(text)


def given_options(values: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, str]:
    """The options that the user gave, each with the flag or variable that counts."""
    said = {option.field: _choose(option, values, environment) for option in OPTIONS}
    return {option.field: said[option.field][1] for option in OPTIONS if said[option.field][0] != option.default}


def _choose(option: Option, values: Mapping[str, Any], environment: Mapping[str, str]) -> tuple[Any, str]:
    """The option's value and the name under which the user gave it."""
    value = values.get(option.field)
    if value not in (None, False):
        return value, option.flag
    if environment.get(option.variable):
        return environment[option.variable], option.variable
    return option.default, option.flag


def _as_bool(value: Any, source: str) -> bool:
    text = str(value).strip().lower()
    if text not in _TRUE + _FALSE:
        raise ValueError(f"{source}={value!r} is not valid; valid are {', '.join(_TRUE)} and {', '.join(_FALSE[:-1])}")
    return text in _TRUE


def _check_choice(source: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{source}: {value!r} is not valid; valid are {', '.join(choices)}")
