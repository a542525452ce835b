"""Config of the plugin: flags and environment variables, validated and frozen."""

import contextlib
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xfuser_cocodiff.engine.autotune.comm_config import CommConfig
from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.compression import modes
from xfuser_cocodiff.engine.compression.mode_names import EXACT, MODES, PAPER, default_mode
from xfuser_cocodiff.engine.compression.modes import CodecSchedule
from xfuser_cocodiff.engine.compression.reference_memory import GIB
from xfuser_cocodiff.engine.topology import devices, launcher
from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.plans import GATHER, Plan
from xfuser_cocodiff.engine.topology.topology import AXIS_NAMES, FLAT, Topology
from xfuser_cocodiff.xdit.settings import removed_options
from xfuser_cocodiff.xdit.settings.options import (
    AUTO,
    ENABLE_OPTION,
    LOG_LEVEL_VARIABLE,
    LOG_LEVELS,
    OFF,
    OPTIONS,
    OVERLAPS,
    RECORD_VARIABLE,
    Option,
)
from xfuser_cocodiff.xdit.settings.removed_options import REMOVED_OPTIONS
from xfuser_cocodiff.xdit.settings.ring_placement import (
    OUTER,
    PLACEMENTS,
    GroupPlacement,
    SequenceRanks,
    place_groups,
    spans_nodes,
)

_ENABLE = next(option for option in OPTIONS if option.field == ENABLE_OPTION)
_CACHE = next(option for option in OPTIONS if option.field == "cocodiff_cache")
MAX_SECONDS = 1e8
"""Longest timeout: three years, which every backend can represent."""
MAX_GIB = 1e9
"""Largest memory budget, far above that of any machine."""
MEASURED_SLOW_AXES = (AUTO,)
"""Value of `CocoDiffConfig.slow_axes` that leaves them to the link probe, on whose result all ranks agree."""
Given = tuple[Any, str]
"""Value of an option, None if it is not given, and the flag or variable that sets it."""
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off", "")


@dataclass(frozen=True)
class Overlap:
    """Overlap of communication and computation that the user fixed; None leaves a value to the autotuner."""

    v_first: bool | None = None
    """Whether V is sent before Q and K are computed."""
    head_groups: int | None = None
    """Number of groups into which the heads of a rank are split."""


@dataclass(frozen=True, kw_only=True)
class CocoDiffConfig:
    """Config of one session of the plugin, the same on every rank."""

    topology: Topology
    """Topology of a Ulysses group."""

    ring: str = OUTER
    """Placement of the ring, one of PLACEMENTS."""

    ring_topology: Topology | None = None
    """Topology of a ring; None without one."""

    ring_profile: Profile | None = None
    """Link profile of a ring; None lets the planner probe its links."""

    plan: Plan | None = None
    """Plan of the all-to-all; None leaves it to the planner."""

    profile: Profile | None = None
    """Link profile of a Ulysses group; None lets the planner probe its links."""

    timeout: float | None = None
    """Longest time of a collective in seconds; None is the default of PyTorch."""

    overlap: Overlap = Overlap()
    """Overlap of communication and computation."""

    mode: str = EXACT
    """Mode of compression, one of MODES."""

    schedule: str | None = None
    """Changes to the schedule of the mode, among them another target of the error."""

    slow_axes: tuple[str, ...] = ()
    """Names of the axes on which a lossy mode may approximate; MEASURED_SLOW_AXES leaves it to the link probe."""

    virtual: Topology | None = None
    """Topology of virtual ranks; None without them."""

    virtual_ring: bool = False
    """Whether the virtual ranks are a ring rather than a Ulysses group."""

    memory_budget: int | None = None
    """Most bytes of link references on each rank; None is the default, by free memory."""

    kernels: str = AUTO
    """Kernels of the codecs, one of kernels.CHOICES."""

    synchronous: bool = False
    """Whether collectives block (CCL_OP_SYNC), so that an accelerator hides no communication."""

    cache: Path | None = None
    """Folder of the tuning cache; None disables it."""

    detected: bool = False
    """Whether the topology was detected from the launcher rather than set by the user."""

    def __post_init__(self) -> None:
        _check_choice("cocodiff_mode", self.mode, MODES)

    @property
    def comm(self) -> CommConfig:
        """Config of the communication of a Ulysses group."""
        slow_axes = None if self.slow_axes == MEASURED_SLOW_AXES else self.slow_axes
        return CommConfig(
            topology=self.topology,
            plan=self.plan,
            profile=self.profile,
            timeout=self.timeout,
            slow_axes=slow_axes if self.mode != EXACT else (),
            gathers_coded=self.mode != PAPER,  # which has no gather
            synchronous=self.synchronous,
        )


def resolve(
    values: Mapping[str, Any],
    environment: Mapping[str, str],
    ranks: SequenceRanks,
    device_type: str = "cuda",
) -> CocoDiffConfig | None:
    """Return the config that flags and environment variables resolve to; flags take precedence.

    Args:
        values: option fields as parsed; None or False means not given.
        environment: environment variables: the COCODIFF_ variables of OPTIONS, and CCL_OP_SYNC of oneCCL.
        ranks: ranks that share a sequence.
        device_type: type of the device of this rank's tensors, as PyTorch names it.

    Returns:
        The config; None if the plugin is not enabled.

    Raises:
        ValueError: an option is not valid; names the flag or variable, its value and the valid set.
    """
    if not is_enabled(values, environment):
        return None
    given = {option.field: _given(option, values, environment) for option in OPTIONS}
    removed_options.check({**given, **{each.field: _given(each, values, environment) for each in REMOVED_OPTIONS}})
    virtual, is_ring = _parse(given["cocodiff_virtual"], lambda text: _virtual(text, ranks.count)) or (None, False)
    placement = _place(given, ranks)
    slow_axes = _slow_axes(given, placement, virtual)
    compresses = bool(slow_axes) and _is_multi_node(ranks, placement, environment)
    mode = _mode(given, compresses or virtual is not None)
    if not (given["cocodiff_slow_axes"][0] or virtual) and devices.capabilities(device_type).is_asynchronous:
        slow_axes = MEASURED_SLOW_AXES
    v_first = _choice(given["cocodiff_v_first"], AUTO, OVERLAPS)
    return CocoDiffConfig(
        topology=placement.topology,
        plan=_parse(given["cocodiff_a2a"], lambda text: _plan(text, virtual or placement.topology, ranks.ring)),
        ring=_choice(given["cocodiff_ring"], OUTER, PLACEMENTS),
        ring_topology=placement.ring_topology,
        ring_profile=placement.ring_profile,
        profile=placement.profile
        if placement.profile or placement.ring_profile  # the ring alone has one if the Ulysses degree is 1
        else _parse(given["cocodiff_profile"], lambda text: _profile(text, virtual or placement.topology, ranks)),
        timeout=_parse(given["cocodiff_timeout"], _seconds),
        overlap=Overlap(
            v_first={"on": True, "off": False}.get(v_first),
            head_groups=_parse(given["cocodiff_head_groups"], _head_groups),
        ),
        mode=mode,
        schedule=_schedule(given, mode),
        slow_axes=slow_axes,
        virtual=virtual,
        virtual_ring=is_ring,
        memory_budget=_parse(given["cocodiff_memory_budget"], _gib),
        kernels=_parse(given["cocodiff_kernels"], lambda text: _kernels(text, device_type)) or AUTO,
        synchronous=launcher.collectives_are_synchronous(environment),
        cache=_parse(given[_CACHE.field], _cache) if given[_CACHE.field][0] else cache_folder(environment),
        detected=given["cocodiff_topology"][0] is None,
    )


def _place(given: Mapping[str, Given], ranks: SequenceRanks) -> GroupPlacement:
    ring = _choice(given["cocodiff_ring"], OUTER, PLACEMENTS), given["cocodiff_ring"][1]
    topology = _parse(given["cocodiff_topology"], lambda text: _topology(text, ranks))
    profile = _parse(given["cocodiff_profile"], lambda text: Profile.read(Path(text)))
    return _parse(ring, lambda placement: place_groups(ranks, topology, placement, profile))


def _slow_axes(given: Mapping[str, Given], placement: GroupPlacement, virtual: Topology | None) -> tuple[str, ...]:
    text, source = given["cocodiff_slow_axes"]
    topology, ring_topology = (virtual, None) if virtual else (placement.topology, placement.ring_topology)
    axes = _parse((text or "", source), lambda text: parse_slow_axes(text, topology, ring_topology, bool(virtual)))
    if virtual and axes == MEASURED_SLOW_AXES and not given["cocodiff_profile"][0]:
        raise ValueError(f"{source}: {AUTO!r} is not valid: with --cocodiff_virtual it needs --cocodiff_profile")
    return axes


def _is_multi_node(ranks: SequenceRanks, placement: GroupPlacement, environment: Mapping[str, str]) -> bool:
    """Return whether ranks of a sequence are on several nodes: by the launcher, without one by the topology."""
    if local := launcher.ranks_per_node(environment):
        return ranks.count > local
    return any(spans_nodes(each) for each in (placement.topology, placement.ring_topology) if each)


def _mode(given: Mapping[str, Given], compresses: bool) -> str:
    return _choice(given["cocodiff_mode"], default_mode(compresses), MODES)


def _topology(text: str, ranks: SequenceRanks) -> Topology:
    """Parse the topology of a Ulysses group, or of all ranks."""
    if ranks.ring > 1 and text.strip() != FLAT and Topology.parse(text).size == ranks.count:
        return Topology.parse(text)
    return Topology.parse(text, ranks.ulysses)


def _plan(text: str, topology: Topology, ring: int) -> Plan | None:
    if text == AUTO:
        return None
    try:
        plan = Plan.parse(text, topology)
    except ValueError as error:
        raise ValueError(f"{error}, or {AUTO!r}") from None
    if plan.gathers_kv and ring > 1:
        raise ValueError(
            f"{text!r} is not valid with --ring_degree {ring}, whose ring gathers K and V; leave out {GATHER}"
        )
    return plan


def _profile(text: str, topology: Topology, ranks: SequenceRanks) -> Profile:
    profile = Profile.read(Path(text))
    if profile.topology != topology:
        with_rings = f" ({ranks.full_topology} with its rings)" if ranks.ring > 1 else ""
        raise ValueError(
            f"{text!r} is not valid: it has the topology {profile.topology}, this run {topology}{with_rings}; if these "
            "are the same, set --cocodiff_topology"
        )
    return profile


def _schedule(given: Mapping[str, Given], mode: str) -> str | None:
    """Return the changes to the schedule of a mode, by --cocodiff_schedule and --cocodiff_error."""

    def parse(text: str) -> str:
        if mode == EXACT:
            raise ValueError(
                f"{text!r} has no effect in the mode {EXACT}; valid are --cocodiff_mode {', '.join(MODES[1:])}"
            )
        CodecSchedule.parse(text, modes.PRESETS[mode])
        return text

    def parse_error(text: str) -> str:
        if mode == PAPER:
            raise ValueError(f"{text!r} has no effect in the mode {PAPER}, which sends values unquantized")
        return parse(f"error={_positive(text, modes.ERRORS, modes.MOST_ERROR):g}")

    changes = [_parse(given["cocodiff_error"], parse_error), _parse(given["cocodiff_schedule"], parse)]
    if all(changes):
        _parse((",".join(changes), "--cocodiff_error with --cocodiff_schedule"), parse)
    return ",".join(filter(None, changes)) or None


def _virtual(text: str, degree: int) -> tuple[Topology, bool]:
    if degree > 1:
        raise ValueError(f"{text!r} is not valid with {degree} ranks; virtual ranks need --ulysses_degree 1")
    return parse_virtual_ranks(text)


_RING = "ring:"


def parse_virtual_ranks(text: str) -> tuple[Topology, bool]:
    """Parse virtual ranks, such as '2x2' or 'ring:2x2'.

    Returns:
        Their topology, and whether they are a ring.

    Raises:
        ValueError: the text is not a topology.
    """
    return Topology.parse(text.removeprefix(_RING)), text.startswith(_RING)


def parse_slow_axes(text: str, topology: Topology, ring: Topology | None, is_virtual: bool = False) -> tuple[str, ...]:
    """Return the names of the axes on which a lossy mode may approximate.

    Args:
        text: names of axes, 'auto', or '' for the default on CPUs: the axis between nodes, or of virtual ranks all axes
            of more than one rank but the innermost.
        topology: topology of a Ulysses group, or of virtual ranks.
        ring: topology of a ring; None without one.
        is_virtual: whether the ranks are virtual.

    Raises:
        ValueError: neither topology has an axis of that name.
    """
    axes = [axis for each in (topology, ring) if each for axis in each.axes]
    used = tuple(dict.fromkeys(axis.name for axis in axes if axis.size > 1))
    if not text:
        return (used[:-1] or used) if is_virtual else tuple(name for name in used if name == AXIS_NAMES[0])
    if text == AUTO:
        return MEASURED_SLOW_AXES
    names, known = tuple(name.strip() for name in text.split(",")), dict.fromkeys(axis.name for axis in axes)
    if not set(names) <= set(known):
        of_ring = f" and of its rings, {ring}," if ring else ""
        raise ValueError(
            f"{text!r} is not valid; valid are {AUTO!r} and axes of the topology {topology}{of_ring} {', '.join(known)}"
        )
    return tuple(dict.fromkeys(names))


def cache_folder(environment: Mapping[str, str]) -> Path | None:
    """Return the folder of the tuning cache by environment variables; None if it is disabled."""
    if text := environment.get(_CACHE.variable):
        return _cache(text)
    try:
        return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache", "cocodiff")
    except RuntimeError:  # a user without a home, as in some containers
        return None


def _cache(text: str) -> Path | None:
    if text == OFF:
        return None
    with contextlib.suppress(OSError):  # a name that is too long, or below a folder that this user may not read
        if not Path(text).exists() or Path(text).is_dir():
            return Path(text)
    raise ValueError(f"{text!r} is not valid; valid are a folder and {OFF!r}")


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
    if not (os.path.isdir(text) and os.access(text, os.W_OK | os.X_OK)):
        raise ValueError(f"{RECORD_VARIABLE}: {text!r} is not valid; valid are folders that can be written to")


def _seconds(text: str) -> float:
    return _positive(text, f"seconds above 0, up to {MAX_SECONDS:g}", MAX_SECONDS)


def _gib(text: str) -> int:
    return int(_positive(text, "GiB above 0, such as 2.5", MAX_GIB) * GIB)


def _kernels(text: str, device_type: str) -> str:
    if text not in kernels.CHOICES:
        raise ValueError(f"{text!r} is not valid; valid are {', '.join(kernels.CHOICES)}")
    kernels.resolve(text, device_type)  # raises if they are not available
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


def is_enabled(values: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    """Return whether the options enable the plugin.

    Args:
        values: option fields as parsed.
        environment: environment variables.

    Raises:
        ValueError: the option is neither true nor false; names the flag or variable and the valid set.
    """
    return _as_bool(*_given(_ENABLE, values, environment))


def given_options(values: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of the options that the user set, each with the flag or variable that takes effect."""
    given = {option: _given(option, values, environment) for option in OPTIONS}
    return {option.field: source for option, (value, source) in given.items() if value != option.default}


def _given(option: Option, values: Mapping[str, Any], environment: Mapping[str, str]) -> Given:
    value = values.get(option.field)
    if value not in (None, False):
        return value, option.flag
    if environment.get(option.variable):
        return environment[option.variable], option.variable
    return option.default, option.flag


def _parse(given: Given, parse: Callable[[Any], Any]) -> Any:
    """Return the parsed value of an option; None if it is not given.

    Raises:
        ValueError: the value is not valid; names the flag or variable.
    """
    value, source = given
    try:
        return None if value is None else parse(value)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def _choice(given: Given, default: str, choices: tuple[str, ...]) -> str:
    value, source = given
    _check_choice(source, value or default, choices)
    return value or default


def _check_choice(source: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{source}: {value!r} is not valid; valid are {', '.join(choices)}")


def _as_bool(value: Any, source: str) -> bool:
    text = str(value).strip().lower()
    if text not in _TRUE + _FALSE:
        raise ValueError(f"{source}={value!r} is not valid; valid are {', '.join(_TRUE)} and {', '.join(_FALSE[:-1])}")
    return text in _TRUE
