"""Measures and checks the codec's kernels at the start of a lossy session; all ranks learn of a failure on one."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch import nn

from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.comm.rank_results import RankError, gather_results
from xfuser_cocodiff.engine.compression.head_format import USUAL_VALUES, HeadFormat
from xfuser_cocodiff.engine.topology import devices
from xfuser_cocodiff.xdit.patching.log import info_once
from xfuser_cocodiff.xdit.platforms.platform import compute_device
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig

if TYPE_CHECKING:
    from xfuser_cocodiff.engine.autotune.codec_probe import CodecSpeed

T = TypeVar("T")


class KernelError(RuntimeError):
    """Kernels cannot be used, since they fail on a rank or differ between ranks; the same error on every rank."""


def head_format(pipeline: Any) -> HeadFormat:
    """Return head dim and type of the values of a pipeline's attention; usual ones where it has no such module."""
    transformer = getattr(pipeline, "transformer", None)
    for module in transformer.modules() if isinstance(transformer, nn.Module) else ():
        if hasattr(module, "inner_dim") and hasattr(module, "heads"):
            return HeadFormat(module.inner_dim // module.heads, transformer.dtype)
    return USUAL_VALUES


def measure_codec(config: CocoDiffConfig, group: dist.ProcessGroup | None) -> "CodecSpeed":
    """Return the speed of the codec on the slowest rank. All ranks must call this.

    Args:
        config: the options.
        group: the ranks that share a sequence, in a group for host memory; None for a single rank.

    Raises:
        KernelError: the kernels fail on a rank, or ranks have different ones; on every rank.
    """
    from xfuser_cocodiff.engine.autotune import codec_probe  # lossless sessions do not import codecs' kernels

    speeds = _on_all_ranks(config, group, "codec probe", lambda backend: codec_probe.measure(compute_device()))
    return codec_probe.CodecSpeed(min(speed for speed, _ in speeds), max(seconds for _, seconds in speeds))


def check(config: CocoDiffConfig, group: dist.ProcessGroup | None, values: HeadFormat = USUAL_VALUES) -> None:
    """Check the kernels of a lossy mode, which also compiles them. All ranks must call this.

    Kernels of CPUs are not checked: tests cover them.

    Args:
        config: the options.
        group: the ranks that share a sequence, in a group for host memory; None for a single rank.
        values: head dim and type of the model's values.

    Raises:
        KernelError: the kernels fail on a rank, or ranks have different ones; on every rank.
    """
    from xfuser_cocodiff.engine.compression import codec_check  # lossless sessions do not import codecs' kernels

    device = compute_device()
    if not devices.capabilities(device.type).is_asynchronous:
        return

    def failure(backend: str) -> str | None:
        if backend == kernels.TORCH:
            return None
        return codec_check.failure(backend, config.mode, config.schedule, device, values)

    results = _on_all_ranks(config, group, "self-check of kernels", failure)
    failed = {rank: reason for rank, reason in enumerate(results) if reason}
    if failed:
        rank, reason = next(iter(failed.items()))
        raise KernelError(
            f"kernels fail their self-check on {len(failed)} of {len(results)} ranks (rank {rank}: {reason})"
        )


def _on_all_ranks(
    config: CocoDiffConfig, group: dist.ProcessGroup | None, stage: str, work: Callable[[str], T]
) -> list[T]:
    """Return the results of work with the kernels of each rank, given their backend.

    Raises:
        KernelError: the work fails on a rank, or ranks have different kernels: backends round differently, so that both
            ends of a link need the same one.
    """
    kernels.use(config.kernels)
    backend = kernels.backend_for(compute_device())
    if backend == kernels.TRITON:
        info_once(
            f"checking the {backend} kernels of mode {config.mode!r}; the first time on a machine, this compiles them, "
            "which delays the start"
        )
    try:
        results = gather_results(lambda: (backend, work(backend)), group, stage)
    except RankError as error:
        raise KernelError(str(error)) from None
    backends = [other for other, _ in results]
    if len(set(backends)) > 1:
        named = ", ".join(f"rank {backends.index(other)}: {other}" for other in dict.fromkeys(backends))
        raise KernelError(f"ranks have different kernels ({named})")
    return [result for _, result in results]
