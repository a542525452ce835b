"""The session of --cocodiff_virtual: one rank with the codecs of many, to evaluate their quality."""

from dataclasses import replace
from typing import Any

from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.compression.default_mode import EXACT, PAPER
from xfuser_cocodiff.tools.comparison.virtual_ranks import VirtualRanks, VirtualRing
from xfuser_cocodiff.xdit.patching.log import warn_once
from xfuser_cocodiff.xdit.session import kernel_check, start_messages, startup, usp_versions
from xfuser_cocodiff.xdit.session.kernel_check import KernelError
from xfuser_cocodiff.xdit.session.session import Session
from xfuser_cocodiff.xdit.settings.config import MEASURED_SLOW_AXES, CocoDiffConfig


def start_session(pipeline: Any, config: CocoDiffConfig, is_compiled: bool) -> Session:
    """Return the session of a single rank with the codecs of many; see `xdit/session/virtual_group.py`."""
    if not usp_versions.is_known():
        reason = (
            "--cocodiff_virtual has no effect with this xfuser, whose USP is unknown; install version "
            f"{' or '.join(usp_versions.DIGESTS)}"
        )
        warn_once(reason)
        return Session(config, lossless_reason=reason)
    if is_compiled:
        warn_once(
            "--cocodiff_virtual has no effect in compiled graphs: the run is lossless; leave out --use_torch_compile"
        )
    virtual = _virtual_ranks(config)
    if virtual is None:
        return Session(config, lossless_reason=start_messages.no_slow_axis(config, config.virtual))
    try:
        kernel_check.check(config, None, kernel_check.head_format(pipeline))
    except KernelError as error:
        warn_once(start_messages.other_kernels(str(error), config.mode))
        config = replace(config, kernels=kernels.TORCH)
    virtual.adopt(pipeline)
    layouts = (None, virtual.layout) if virtual.is_ring else (virtual.layout, None)
    runtime = startup.new_runtime(config, layouts[0], layouts[1], lambda values, **_: values)
    return Session(config, runtime=runtime, virtual_group=virtual)


def _virtual_ranks(config: CocoDiffConfig) -> VirtualRanks | None:
    """Return the virtual ranks of this rank; None in lossless mode, or without a slow axis."""
    if config.mode == EXACT:
        warn_once(f"--cocodiff_virtual has no effect with --cocodiff_mode {EXACT}; choose another mode")
        return None
    assert config.virtual
    slow = config.profile.slow_axes if config.profile and config.slow_axes == MEASURED_SLOW_AXES else config.slow_axes
    gathered = {*config.virtual.moving_axes} & {*slow}
    may_gather = config.mode != PAPER and (config.plan is None or {*config.plan.gathered_axes} == gathered)
    virtual = (VirtualRing if config.virtual_ring else VirtualRanks)(config.virtual, tuple(slow), may_gather)
    if virtual.layout.num_slow == 1:
        warn_once(start_messages.no_slow_axis(config, config.virtual))
        return None
    name = "a virtual ring" if config.virtual_ring else "virtual ranks"
    where, slow = f"{', '.join(slow)} ({name} {config.virtual})", () if config.virtual_ring else slow
    start_messages.warn_lossy(config, where, slow, virtual.layout.num_slow, virtual.gather_layout is not None)
    return virtual
