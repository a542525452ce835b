"""Agrees, at the start of a session, on kernels that pass their self-check on all ranks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from xfuser_cocodiff.engine import kernels
from xfuser_cocodiff.engine.comm import failure_detection
from xfuser_cocodiff.engine.compression import codec_check
from xfuser_cocodiff.engine.compression.codec_check import USUAL_VALUES, ValueFormat
from xfuser_cocodiff.engine.settings.config import CocoDiffConfig
from xfuser_cocodiff.engine.settings.options import EXACT
from xfuser_cocodiff.engine.topology import devices
from xfuser_cocodiff.xdit.patching.log import info_once, warn_once
from xfuser_cocodiff.xdit.platforms.platform import compute_device

_HEAD_DIMS = ("attention_head_dim", "head_dim")
_WIDTHS = (("hidden_size", "num_attention_heads"), ("dim", "n_heads"))
"""Entries of a transformer's config for its head dim, or for its width and number of heads."""


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


def with_checked_kernels(
    config: CocoDiffConfig, group: dist.ProcessGroup | None, values: ValueFormat = USUAL_VALUES
) -> CocoDiffConfig:
    """Return the config with kernels that pass their self-check on all ranks: PyTorch's where others fail on one.

    They are also PyTorch's if ranks have different ones, as where one lacks Triton or a compiler.
    It also compiles them. All ranks must call this; all of them get the same kernels. Kernels of CPUs are not checked:
    tests cover them.

    Args:
        config: the options.
        group: the ranks that share a sequence, in a group for host memory; None for a single rank.
        values: head dim and type of the model's values.
    """
    device = compute_device()
    if config.mode == EXACT or not devices.capabilities(device.type).is_asynchronous:
        return config
    kernels.use(config.kernels)
    backend, found = kernels.backend_for(device), None
    if backend != kernels.TORCH:
        info_once(
            f"checking the {backend} kernels of mode {config.mode!r}; the first time on a machine, this compiles them, "
            "which delays the start"
        )
        if found := codec_check.failure(backend, config.mode, config.schedule, device, values):
            found = f"{backend}, {found}"
    results = [(backend, found)]
    if group is not None:
        results = [("", None)] * group.size()
        with failure_detection.report_failed_ranks(group, "self-check of kernels"):
            dist.all_gather_object(results, (backend, found), group=group)
    problem = _problem(results)
    if problem is None:
        return config
    warn_once(
        f"{problem}: all ranks use those of PyTorch, which are slower; install the same Triton and driver on all hosts"
    )
    return replace(config, kernels=kernels.TORCH)


def _problem(results: Sequence[tuple[str, str | None]]) -> str | None:
    """Return why ranks cannot use their kernels, given each rank's backend and failure; None if they can.

    Backends round differently, so that both ends of a link need the same one.
    """
    failed = {rank: reason for rank, (_, reason) in enumerate(results) if reason}
    if failed:
        rank, reason = next(iter(failed.items()))
        return f"kernels fail their self-check on {len(failed)} of {len(results)} ranks (rank {rank}: {reason})"
    first_rank_of: dict[str, int] = {}
    for rank, (backend, _) in enumerate(results):
        first_rank_of.setdefault(backend, rank)
    if len(first_rank_of) == 1:
        return None
    named = ", ".join(f"rank {rank}: {backend}" for backend, rank in first_rank_of.items())
    return f"ranks have different kernels ({named})"
