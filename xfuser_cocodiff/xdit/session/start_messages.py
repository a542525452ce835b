"""Messages at the start of a session: links, the mode, and options without effect."""

from collections.abc import Sequence

from xfuser_cocodiff.engine.autotune.comm_setup import CommSetup
from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.compression.default_mode import EXACT, PAPER
from xfuser_cocodiff.engine.topology.plans import GATHER
from xfuser_cocodiff.engine.topology.slow_axes import SLOW_RATIO
from xfuser_cocodiff.xdit.patching.log import warn_once
from xfuser_cocodiff.xdit.platforms.platform import compute_device
from xfuser_cocodiff.xdit.settings.config import MEASURED_SLOW_AXES, CocoDiffConfig


def links(config: CocoDiffConfig, setups: Sequence[CommSetup], others_fail: bool) -> str:
    """Return the line with the links of a rank, and in lossy modes what makes an axis slow.

    Args:
        config: the options.
        setups: communication of the Ulysses group, and of the ring if there is one.
        others_fail: whether PyTorch's kernels are in use since others fail.
    """
    profiles = [setup.profile for setup in setups if setup.profile]
    speeds = [
        f"{link.name}{' of the ring' * (setup is not setups[0])} {gigabytes(link.bytes_per_second)}"
        for setup in setups
        for link in (setup.profile.moving_links if setup.profile else ())
    ]
    line = f"links of a rank: {', '.join(speeds)}" if speeds else "links not measured"
    if config.mode == EXACT:
        return line
    slow = "slow axes are set, not measured"
    if config.slow_axes == MEASURED_SLOW_AXES and profiles:
        codec = profiles[0].codec_bytes_per_second
        speed, what = (codec, "the codec") if codec else (profiles[0].copy_bytes_per_second, "a copy")
        slow = f"slow is an axis below {gigabytes(SLOW_RATIO * speed)}, {SLOW_RATIO:.0%} of {what}"
    explained = kernels.explain(config.kernels, compute_device().type)
    return f"{line}; {slow}; kernels: {'torch, since others fail' if others_fail else explained}"


def gigabytes(bytes_per_second: float) -> str:
    """Return a bandwidth or a throughput in words."""
    return f"{bytes_per_second / 1e9:.3g} GB/s"


def warn_lossy(config: CocoDiffConfig, where: str, slow_axes: Sequence[str], num_slow: int, may_gather: bool) -> None:
    """Warn that a mode compresses communication, and of a plan that gathers K and V without effect.

    Args:
        config: the options.
        where: the links, in words.
        slow_axes: names of the slow axes of the Ulysses group; none where only a ring has any.
        num_slow: coordinates on them.
        may_gather: whether coded layers may gather K and V.
    """
    how = ""
    if slow_axes:
        how = f": {_crossing(config, slow_axes, num_slow, may_gather)}"
        if config.plan and config.plan.gathers_kv and not may_gather:
            gathered = "in no plan" if config.mode == PAPER else f"along its slow axes, {', '.join(slow_axes)}, only"
            warn_once(
                f"{GATHER} of --cocodiff_a2a {config.plan} has no effect: mode {config.mode!r} gathers K and V "
                f"{gathered}; leave it out"
            )
    warn_once(
        f"lossy: mode {config.mode!r} compresses communication on {where}{how}; --cocodiff_mode {EXACT} is "
        "bit-identical to stock"
    )


def _crossing(config: CocoDiffConfig, slow_axes: Sequence[str], num_slow: int, may_gather: bool) -> str:
    """Return how coded layers cross the slow axes; see :func:`warn_lossy`."""
    if not may_gather:
        return "all-to-alls by heads"
    if config.plan or num_slow == 2:  # by the planner's rule, two coordinates gather whatever the heads are
        return f"K and V gathered along {', '.join(slow_axes)}, Q and O lossless"
    return (
        "all-to-alls by heads; K and V gathered only where that sends no more bytes, as with "
        f"{num_slow - 1} or more Q heads for each K/V head"
    )


def no_slow_axis(config: CocoDiffConfig, topology: object) -> str:
    """Return the reason why a lossy mode compresses nothing in a topology."""
    found = f"no slow axis in the topology {topology}"
    if config.slow_axes == MEASURED_SLOW_AXES:
        found = f"no axis of the topology {topology} is slow for this device"
    return (
        f"{found}: mode {config.mode!r} has no effect and the run is "
        "lossless; --cocodiff_slow_axes names axes to compress"
    )


def other_kernels(problem: str, mode: str, is_lossless: bool = False) -> str:
    """Return the warning that PyTorch's kernels replace others.

    Args:
        problem: why the others cannot be used.
        mode: the lossy mode.
        is_lossless: whether no axis is slow for this reason.
    """
    effect = f", so that no axis is slow beside them: the run is lossless in mode {mode!r}" if is_lossless else ""
    return (
        f"{problem}: all ranks use PyTorch's kernels, which are slower{effect}; install the same Triton and driver on "
        "all hosts"
    )
