"""The line at the start of a session: kernels, links beside the codec, and communicators."""

from collections.abc import Iterator, Sequence

from xfuser_cocodiff.engine.autotune.plan_selection import CommSetup
from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.compression.mode_names import EXACT
from xfuser_cocodiff.engine.topology.link_profile import SLOW_RATIO, Profile
from xfuser_cocodiff.xdit.platforms.platform import compute_device
from xfuser_cocodiff.xdit.settings.config import MEASURED_SLOW_AXES, CocoDiffConfig


def start_line(config: CocoDiffConfig, setups: Sequence[CommSetup], kernels_in_use: str | None = None) -> str:
    """Return the line.

    Args:
        config: the options.
        setups: communication of the Ulysses group, and of the ring if there is one.
        kernels_in_use: kernels of the codec and why, where they are not those of the options.
    """
    profiles = [setup.profile for setup in setups if setup.profile]
    links = [
        f"{link.name}{' of the ring' * (setup is not setups[0])} {gigabytes(link.bytes_per_second)}"
        for setup in setups
        if setup.profile
        for link in setup.profile.moving_links
    ]
    groups = {id(group) for setup in setups for mesh in _meshes(setup) for group in mesh.stages.groups.values()}
    parts = [f"links of a rank: {', '.join(links)}" if links else "links not measured"]
    if config.mode != EXACT:
        chosen = kernels_in_use or kernels.explain(config.kernels, compute_device().type)
        parts += [_codec(config, profiles), f"kernels: {chosen}"]
    return "; ".join([*parts, f"communicators: {len(groups)}"])


def _codec(config: CocoDiffConfig, profiles: Sequence[Profile]) -> str:
    """Return the threshold at which an axis is slow, and the speed that it depends on."""
    if config.slow_axes != MEASURED_SLOW_AXES or not profiles:
        return "slow axes are set, not measured"
    [profile, *_] = profiles
    if speed := profile.codec_bytes_per_second:
        return f"codec {gigabytes(speed)}: slow is an axis below {gigabytes(SLOW_RATIO * speed)}"
    limit = gigabytes(SLOW_RATIO * profile.copy_bytes_per_second)
    return f"codec not measured, since no axis is below {limit}, {SLOW_RATIO:.0%} of a copy"


def _meshes(setup: CommSetup) -> Iterator[Mesh]:
    """Yield the meshes of a group, perhaps some of them repeatedly."""
    yield setup.mesh
    for partition in (setup.partition, setup.gather):
        if partition:
            yield partition.slow
            if partition.fast:
                yield partition.fast


def gigabytes(bytes_per_second: float) -> str:
    """Return a bandwidth or a throughput in words."""
    return f"{bytes_per_second / 1e9:.3g} GB/s"
