"""Heads that are not divisible by the ranks, which xDiT rejects: all-to-alls pad them.

Padding does not change results, since heads attend independently.
"""

import functools
from collections.abc import Callable
from typing import Any

from xfuser_cocodiff.xdit.patching import host
from xfuser_cocodiff.xdit.patching.log import info_once
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.session import usp_versions


def patches() -> list[Patch]:
    """Return the patch of xDiT's check."""
    return [
        Patch(
            "xfuser.core.distributed.runtime_state",
            "DiTRuntimeState._check_model_and_parallel_config",
            "zero-padded heads",
            _allow_any_heads,
            ("self", "pipeline", "parallel_config"),
        ),
    ]


def _allow_any_heads(original: Callable) -> Callable:
    @functools.wraps(original)
    def _check_model_and_parallel_config(self: Any, pipeline: Any, parallel_config: Any) -> None:
        degree, heads = parallel_config.sp_config.ulysses_degree, self._get_model_attention_heads(pipeline)
        is_ours = host.config_of(parallel_config) and parallel_config.pp_degree == 1
        is_ours = is_ours and usp_versions.is_known()
        if not is_ours or heads % degree == 0:
            original(self, pipeline, parallel_config)
            return
        most = -(-heads // degree)
        info_once(
            f"{heads} heads are not divisible by {degree} ranks: zero-padded to {most * degree} in all-to-alls by "
            "heads; less or no padding in layers that gather K and V"
        )

    return _check_model_and_parallel_config
