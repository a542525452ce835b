"""Agrees, at the start of a session, on kernels that pass their self-check on all ranks."""

from dataclasses import replace

import torch.distributed as dist

from xfuser_cocodiff.engine import kernels
from xfuser_cocodiff.engine.comm import failure_detection
from xfuser_cocodiff.engine.compression import codec_check
from xfuser_cocodiff.engine.settings.config import CocoDiffConfig
from xfuser_cocodiff.engine.settings.options import EXACT
from xfuser_cocodiff.engine.topology import devices
from xfuser_cocodiff.xdit.patching.log import warn_once
from xfuser_cocodiff.xdit.platforms.platform import compute_device


def with_checked_kernels(config: CocoDiffConfig, group: dist.ProcessGroup | None) -> CocoDiffConfig:
    """Return the config with kernels that pass their self-check on all ranks: PyTorch's where others fail on one.

    It also compiles them. All ranks must call this; all of them get the same kernels. Kernels of CPUs are not checked:
    tests cover them.

    Args:
        config: the options.
        group: the ranks that share a sequence, in a group for host memory; None for a single rank.
    """
    device = compute_device()
    if config.mode == EXACT or not devices.capabilities(device.type).is_asynchronous:
        return config
    kernels.use(config.kernels)
    backend, found = kernels.backend_for(device), None
    if backend != kernels.TORCH and (found := codec_check.failure(backend, config.mode, config.schedule, device)):
        found = f"{backend}, {found}"
    reasons = [found]
    if group is not None:
        reasons = [None] * group.size()
        with failure_detection.report_failed_ranks(group, "self-check of kernels"):
            dist.all_gather_object(reasons, found, group=group)
    failed = {rank: reason for rank, reason in enumerate(reasons) if reason}
    if not failed:
        return config
    rank, reason = next(iter(failed.items()))
    warn_once(
        f"kernels fail their self-check on {len(failed)} of {len(reasons)} ranks (rank {rank}: {reason}): all ranks "
        "use those of PyTorch, which are slower; update Triton and the driver"
    )
    return replace(config, kernels=kernels.TORCH)
