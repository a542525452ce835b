"""Values of options from their texts. A parser raises a ValueError if a text is not valid."""

import contextlib
import math
from pathlib import Path

from xfuser_cocodiff.engine.codec import kernels as codec_kernels
from xfuser_cocodiff.engine.compression import modes
from xfuser_cocodiff.engine.compression.default_mode import EXACT, MODES, PAPER
from xfuser_cocodiff.engine.compression.modes import CodecSchedule
from xfuser_cocodiff.engine.compression.reference_memory import GIB
from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.plans import GATHER, Plan
from xfuser_cocodiff.engine.topology.topology import FLAT, Topology
from xfuser_cocodiff.xdit.settings.config import AUTO, MEASURED_SLOW_AXES
from xfuser_cocodiff.xdit.settings.option import InvalidTextError
from xfuser_cocodiff.xdit.settings.ring_placement import SequenceRanks

OFF = "off"
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
MAX_SECONDS = 1e8
"""Longest timeout: three years, which every backend can represent."""
MAX_GIB = 1e9
"""Largest memory budget, far above that of any machine."""
_RING = "ring:"


def boolean(text: str) -> bool:
    """Parse a boolean."""
    word = text.strip().lower()
    if word not in TRUE + FALSE:
        raise InvalidTextError
    return word in TRUE


def positive(text: str, most: float) -> float:
    """Parse a number above 0."""
    value = math.nan
    with contextlib.suppress(ValueError):
        value = float(text)
    if not 0 < value <= most:
        raise InvalidTextError
    return value


def seconds(text: str) -> float:
    """Parse a time."""
    return positive(text, MAX_SECONDS)


def memory(text: str) -> int:
    """Parse GiB, as bytes."""
    return int(positive(text, MAX_GIB) * GIB)


def v_first(text: str) -> bool | None:
    """Parse whether V goes first; None leaves it to the autotuner."""
    return {"on": True, OFF: False}.get(text)


def head_groups(text: str) -> int | None:
    """Parse a number of head groups; None leaves it to the autotuner."""
    if text == AUTO:
        return None
    if not (text.isdecimal() and int(text) >= 1):
        raise InvalidTextError
    return int(text)


def topology(text: str, ranks: SequenceRanks) -> Topology:
    """Parse the topology of a Ulysses group, or of all ranks that share a sequence."""
    if ranks.ring > 1 and text.strip() != FLAT and Topology.parse(text).size == ranks.count:
        return Topology.parse(text)
    return Topology.parse(text, ranks.ulysses)


def plan(text: str, topology: Topology, ring: int) -> Plan | None:
    """Parse the plan of all-to-alls; None leaves it to the planner.

    Args:
        text: the plan.
        topology: topology that it is for.
        ring: Ring degree.
    """
    if text == AUTO:
        return None
    try:
        parsed = Plan.parse(text, topology)
    except ValueError as error:
        raise ValueError(f"{error}, or {AUTO!r}") from None
    if parsed.gathers_kv and ring > 1:
        raise ValueError(
            f"{text!r} is not valid with --ring_degree {ring}, whose ring gathers K and V; leave out {GATHER}"
        )
    return parsed


def profile(text: str) -> Profile:
    """Read a link profile."""
    return Profile.read(Path(text))


def kernels(text: str, device_type: str) -> str:
    """Parse a choice of kernels, which must be available on a device type."""
    codec_kernels.resolve(text, device_type)
    return text


def error(text: str, mode: str) -> str:
    """Parse a target of the error, as a change to the schedule of a mode."""
    if mode == PAPER:
        raise ValueError(f"{text!r} has no effect in the mode {PAPER}, which sends values unquantized")
    return schedule(f"error={positive(text, modes.MOST_ERROR):g}", mode)


def schedule(text: str, mode: str) -> str:
    """Parse changes to the schedule of a mode."""
    if mode == EXACT:
        lossy = ", ".join(MODES[1:])
        raise ValueError(f"{text!r} has no effect in the mode {EXACT}; valid are --cocodiff_mode {lossy}")
    CodecSchedule.parse(text, modes.PRESETS[mode])
    return text


def slow_axes(text: str, topology: Topology, ring: Topology | None, has_links: object = True) -> tuple[str, ...]:
    """Parse the names of the axes on which a lossy mode may approximate.

    Args:
        text: the names, or 'auto'.
        topology: topology of a Ulysses group, or of virtual ranks.
        ring: topology of a ring; None without one.
        has_links: whether there are links to measure, or a profile of them; virtual ranks have none.
    """
    if text == AUTO:
        if not has_links:
            raise ValueError(f"{AUTO!r} is not valid: with --cocodiff_virtual it needs --cocodiff_profile")
        return MEASURED_SLOW_AXES
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    parts = [topology, ring] if ring else [topology]
    known = dict.fromkeys(axis.name for each in parts for axis in each.axes)
    if not set(names) <= set(known):
        of_ring = f" and of its rings, {ring}," if ring else ""
        raise ValueError(
            f"{text!r} is not valid; valid are {AUTO!r} and axes of the topology {topology}{of_ring} {', '.join(known)}"
        )
    for moving in (each.moving_axes for each in parts):
        valid = [moving[:count] for count in range(1, len(moving) + 1)]
        if tuple(name for name in moving if name in names) not in ((), *valid):
            raise ValueError(
                f"{text!r} is not valid: slow axes must be the outermost ones; of {topology} valid are {AUTO!r}, "
                f"{', '.join(repr(','.join(each)) for each in valid)}"
            )
    return names


def virtual(text: str, degree: int = 1) -> tuple[Topology, bool]:
    """Parse virtual ranks, such as '2x2' or 'ring:2x2'.

    Returns:
        Their topology, and whether they are a ring.
    """
    if degree > 1:
        raise ValueError(f"{text!r} is not valid with {degree} ranks; virtual ranks need --ulysses_degree 1")
    return Topology.parse(text.removeprefix(_RING)), text.startswith(_RING)


def cache(text: str) -> Path | None:
    """Parse the folder of the tuning cache; None disables it."""
    if text == OFF:
        return None
    with contextlib.suppress(OSError):  # a name that is too long, or below a folder that this user may not read
        if not Path(text).exists() or Path(text).is_dir():
            return Path(text)
    raise InvalidTextError
