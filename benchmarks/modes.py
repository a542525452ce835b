"""Sessions of the plugin in xDiT's process groups, with known links."""

from collections.abc import Mapping
from dataclasses import replace

from benchmarks import bare_runtime
from xfuser_cocodiff.engine.autotune.tuning_cache import TuningCache
from xfuser_cocodiff.engine.topology.link_profile import Profile
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.session import startup
from xfuser_cocodiff.xdit.session.session import Session
from xfuser_cocodiff.xdit.settings.parsers import OFF
from xfuser_cocodiff.xdit.settings.resolve import resolve
from xfuser_cocodiff.xdit.settings.ring_placement import SequenceRanks, UlyssesRingSplit


def new_session(options: Mapping[str, str], profile: Profile, split: UlyssesRingSplit, device_type: str) -> Session:
    """Return a session.

    Args:
        options: the plugin's options, by the names of their fields.
        profile: links of all ranks.
        split: degrees of the process groups.
        device_type: type of the ranks' device.
    """
    topology, (group, around) = profile.topology, bare_runtime.process_groups()
    values = {"use_cocodiff": True, "cocodiff_cache": OFF, **options}
    config = resolve(values, {}, SequenceRanks(split.ulysses, topology, split.ring), device_type)
    if split.ring > 1:
        config = replace(config, ring_profile=_restricted(profile, split.ring_topology(topology)))
    # With a Ulysses degree of 1, the ring has all links.
    ulysses = _restricted(profile, split.ulysses_topology(topology)) if split.ulysses > 1 else None
    known = TuningCache({}, ulysses)
    return startup.create_session(group, config, known, ring_group=around if split.ring > 1 else None)


def _restricted(profile: Profile, topology: Topology) -> Profile:
    return profile if topology == profile.topology else profile.restrict_to(topology)
