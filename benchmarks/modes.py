"""Modes of the plugin in the notation of benchmarks, and their sessions."""

from dataclasses import replace

from benchmarks import bare_runtime
from xfuser_cocodiff.engine.autotune.tuning_cache import TuningCache
from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.session import startup
from xfuser_cocodiff.xdit.session.session import Session
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig
from xfuser_cocodiff.xdit.settings.parsers import OFF
from xfuser_cocodiff.xdit.settings.resolve import resolve
from xfuser_cocodiff.xdit.settings.ring_placement import SequenceRanks, UlyssesRingSplit

_OPTIONS = {"v_first", "head_groups", "schedule", "slow_axes"}


def parse_mode(mode: str, topology: Topology, split: UlyssesRingSplit, device_type: str = "cpu") -> CocoDiffConfig:
    """Parse MODE[/PLAN][@OPTION=VALUE...], in which a semicolon stands for a comma inside a value.

    Raises:
        ValueError: the mode or one of its options is not valid.
    """
    main, *fixed = mode.split("@")
    name, _, plan = main.partition("/")
    options = dict(option.partition("=")[::2] for option in fixed)
    try:
        if unknown := options.keys() - _OPTIONS:
            raise ValueError(f"{min(unknown)!r} is not valid after @; valid are {'=, '.join(sorted(_OPTIONS))}=")
        values = {
            "use_cocodiff": True,
            "cocodiff_mode": name,
            "cocodiff_a2a": plan.replace(";", ",") or None,
            "cocodiff_cache": OFF,
        }
        values |= {f"cocodiff_{key}": value.replace(";", ",") for key, value in options.items()}
        ranks = SequenceRanks(split.ulysses, topology, split.ring)
        return resolve(values, {}, ranks, device_type)
    except ValueError as error:
        raise ValueError(f"mode {mode!r}: {error}") from None


def new_session(mode: str, profile: Profile, split: UlyssesRingSplit, device_type: str) -> Session:
    """Return a session of a mode in xDiT's process groups, with known links.

    Args:
        mode: in the notation of :func:`parse_mode`.
        profile: links of all ranks.
        split: degrees of the process groups.
        device_type: type of the ranks' device.
    """
    topology, (group, around) = profile.topology, bare_runtime.process_groups()
    config = parse_mode(mode, topology, split, device_type)
    if split.ring > 1:
        config = replace(config, ring_profile=_restricted(profile, split.ring_topology(topology)))
    # With a Ulysses degree of 1, the ring has all links.
    ulysses = _restricted(profile, split.ulysses_topology(topology)) if split.ulysses > 1 else None
    known = TuningCache({}, ulysses)
    return startup.create_session(group, config, known, ring_group=around if split.ring > 1 else None)


def _restricted(profile: Profile, topology: Topology) -> Profile:
    return profile if topology == profile.topology else profile.restrict_to(topology)
