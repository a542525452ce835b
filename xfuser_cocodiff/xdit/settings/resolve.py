"""The config to which flags and variables resolve."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from xfuser_cocodiff.engine.compression.default_mode import default_mode
from xfuser_cocodiff.engine.topology import devices, launcher
from xfuser_cocodiff.engine.topology.topology import AXIS_NAMES, Topology
from xfuser_cocodiff.xdit.settings import parsers
from xfuser_cocodiff.xdit.settings.config import AUTO, MEASURED_SLOW_AXES, CocoDiffConfig, Overlap
from xfuser_cocodiff.xdit.settings.option import GivenOptions, given_options
from xfuser_cocodiff.xdit.settings.options import ENABLE_OPTION, OPTIONS, REMOVED_OPTIONS, SHARE_FIELD
from xfuser_cocodiff.xdit.settings.ring_placement import OUTER, GroupPlacement, SequenceRanks, place_groups, spans_nodes
from xfuser_cocodiff.xdit.settings.variables import collectives_are_synchronous


def is_enabled(values: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    """Return whether the options enable the plugin.

    Args:
        values: option fields as parsed.
        environment: environment variables.

    Raises:
        ValueError: the option is neither true nor false; names the flag or variable and the valid set.
    """
    return bool(given_options(OPTIONS, values, environment).parse(ENABLE_OPTION))


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
    given = given_options((*OPTIONS, *REMOVED_OPTIONS), values, environment)
    for option in REMOVED_OPTIONS:
        given.parse(option.field)
    given.parse(SHARE_FIELD)  # it acts before there is a config
    virtual, is_virtual_ring = given.parse("cocodiff_virtual", ranks.count) or (None, False)
    placement = _place(given, ranks, virtual)
    topology, ring_topology = (virtual, None) if virtual else (placement.topology, placement.ring_topology)
    slow_axes = given.parse("cocodiff_slow_axes", topology, ring_topology, not virtual or placement.profile)
    axes_on_cpus = slow_axes or default_slow_axes(topology, ring_topology, bool(virtual))
    is_multi_node = bool(axes_on_cpus) and _is_multi_node(ranks, placement, environment)
    mode = given.parse("cocodiff_mode") or default_mode(is_multi_node or bool(virtual))
    is_measured = not virtual and devices.capabilities(device_type).is_asynchronous
    return CocoDiffConfig(
        **vars(placement),
        plan=given.parse("cocodiff_a2a", topology, ranks.ring),
        timeout=given.parse("cocodiff_timeout"),
        overlap=Overlap(given.parse("cocodiff_v_first"), given.parse("cocodiff_head_groups")),
        mode=mode,
        schedule=_schedule(given, mode),
        slow_axes=slow_axes or (MEASURED_SLOW_AXES if is_measured else axes_on_cpus),
        virtual=virtual,
        virtual_ring=is_virtual_ring,
        memory_budget=given.parse("cocodiff_memory_budget"),
        kernels=given.parse("cocodiff_kernels", device_type) or AUTO,
        synchronous=collectives_are_synchronous(environment),
        cache=cache_folder(environment, values),
    )


def _place(given: GivenOptions, ranks: SequenceRanks, virtual: Topology | None) -> GroupPlacement:
    """Return topologies and profiles of Ulysses groups, or of virtual ranks, and of rings."""
    profile = given.parse("cocodiff_profile")
    topology, ring = given.parse("cocodiff_topology", ranks), given.parse("cocodiff_ring") or OUTER
    placement = place_groups(ranks, topology, ring, profile)
    expected = virtual or placement.topology
    if placement.profile and placement.profile.topology != expected:
        valid = f" and, if {ring!r} rings align with the axes, of {ranks.topology}" if ranks.ring > 1 else ""
        with given.named("cocodiff_profile"):
            raise ValueError(
                f"{given['cocodiff_profile'].text!r} is not valid: it has the topology {placement.profile.topology}; "
                f"valid are those of {expected}{valid}; if these are the same, set --cocodiff_topology"
            )
    return placement


def _is_multi_node(ranks: SequenceRanks, placement: GroupPlacement, environment: Mapping[str, str]) -> bool:
    """Return whether ranks of a sequence are on several nodes: by the launcher, without one by the topology."""
    if local := launcher.ranks_per_node(environment):
        return ranks.count > local
    return any(spans_nodes(each) for each in (placement.topology, placement.ring_topology) if each)


def default_slow_axes(topology: Topology, ring: Topology | None, is_virtual: bool) -> tuple[str, ...]:
    """Return the slow axes without --cocodiff_slow_axes where they are not measured: the axis between nodes, or of
    virtual ranks all axes of more than one rank but the innermost.

    Args:
        topology: topology of a Ulysses group, or of virtual ranks.
        ring: topology of a ring; None without one.
        is_virtual: whether the ranks are virtual.
    """
    axes = [axis for each in (topology, ring) if each for axis in each.axes]
    used = tuple(dict.fromkeys(axis.name for axis in axes if axis.size > 1))
    return (used[:-1] or used) if is_virtual else tuple(name for name in used if name == AXIS_NAMES[0])


def _schedule(given: GivenOptions, mode: str) -> str | None:
    """Return the changes to the schedule of a mode, by --cocodiff_error and --cocodiff_schedule."""
    fields = [field for field in ("cocodiff_error", "cocodiff_schedule") if field in given]
    changes = ",".join(given.parse(field, mode) for field in fields)
    if len(fields) > 1:
        with given.named(*fields):
            parsers.schedule(changes, mode)
    return changes or None


def cache_folder(environment: Mapping[str, str], values: Mapping[str, Any] = MappingProxyType({})) -> Path | None:
    """Return the folder of the tuning cache by the options; None if it is disabled."""
    given = given_options(OPTIONS, values, environment)
    if "cocodiff_cache" in given:
        return given.parse("cocodiff_cache")
    try:
        return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache", "cocodiff")
    except RuntimeError:  # a user without a home, as in some containers
        return None
