"""Measures and checks the codec's kernels at the start of a lossy session; all ranks learn of a failure on one."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from xfuser_cocodiff.engine.autotune.plan_selection import CommSetup
from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.comm.rank_results import RankError, gather_results
from xfuser_cocodiff.engine.compression.value_format import USUAL_VALUES, ValueFormat
from xfuser_cocodiff.engine.topology import devices
from xfuser_cocodiff.xdit.patching.log import info_once
from xfuser_cocodiff.xdit.platforms.platform import compute_device
from xfuser_cocodiff.xdit.session.start_line import gigabytes
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig

if TYPE_CHECKING:
    from xfuser_cocodiff.engine.autotune.codec_probe import CodecSpeed

T = TypeVar("T")

_HEAD_DIMS = ("attention_head_dim", "head_dim")
_WIDTHS = (("hidden_size", "num_attention_heads"), ("dim", "n_heads"))
"""Entries of a transformer's config for its head dim, or for its width and number of heads."""


class KernelError(RuntimeError):
    """Kernels cannot be used, since they fail on a rank or differ between ranks; the same error on every rank."""


def value_format(pipeline: Any) -> ValueFormat:
    """Return head dim and type of the values of a pipeline's attention; the defaults if its transformer has neither."""
    transformer = getattr(pipeline, "transformer", None)
    config, default = getattr(transformer, "config", None), USUAL_VALUES
    sizes = [getattr(config, name, None) for name in _HEAD_DIMS]
    for names in _WIDTHS:
        width, heads = (getattr(config, name, None) for name in names)
        sizes.append(width // heads if isinstance(width, int) and isinstance(heads, int) else None)
    head_dim = next((size for size in sizes if isinstance(size, int)), default.head_dim)
    dtype = getattr(transformer, "dtype", None)
    return ValueFormat(head_dim, dtype if isinstance(dtype, torch.dtype) else default.dtype)


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
    return codec_probe.CodecSpeed(
        *(limit(column) for limit, column in zip((min, max), zip(*speeds, strict=True), strict=True))
    )


def check(config: CocoDiffConfig, group: dist.ProcessGroup | None, values: ValueFormat = USUAL_VALUES) -> None:
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
    first_rank_of: dict[str, int] = {}
    for rank, (other, _) in enumerate(results):
        first_rank_of.setdefault(other, rank)
    if len(first_rank_of) > 1:
        named = ", ".join(f"rank {rank}: {other}" for other, rank in first_rank_of.items())
        raise KernelError(f"ranks have different kernels ({named})")
    return [result for _, result in results]


def fallback_warning(problem: str, mode: str, before: Sequence[CommSetup] = (), after: Sequence[CommSetup] = ()) -> str:
    """Return the warning that PyTorch's kernels replace others, with the cause and the cost.

    Args:
        problem: why the others cannot be used.
        mode: the lossy mode.
        before: communication with the others; empty if it is unknown.
        after: communication with PyTorch's kernels; empty with virtual ranks.
    """
    replaced, speed = (
        next((setup.profile.codec_bytes_per_second for setup in setups if setup.profile), 0.0)
        for setups in (before, after)
    )
    cost = f"which encode {gigabytes(speed)}" if speed else "which are slower"
    cost += f" instead of {gigabytes(replaced)}" if speed and replaced else ""
    if after and not any(setup.partition for setup in after):
        cost += f", so that no axis is slow beside them: mode {mode!r} compresses nothing and the run is lossless"
    return f"{problem}: all ranks use PyTorch's kernels, {cost}; install the same Triton and driver on all hosts"
