"""Zero-padding of heads and tokens that are not divisible by the ranks, which xDiT rejects or fails on.

Padding does not change results: heads attend independently, and attention leaves out tokens added at the end.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from xfuser_cocodiff.engine.attention.reshard import SEQUENCE
from xfuser_cocodiff.xdit.patching import host
from xfuser_cocodiff.xdit.patching.log import info_once
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.patching.symbol_lookup import without
from xfuser_cocodiff.xdit.session import usp_versions
from xfuser_cocodiff.xdit.session.session import active

_FLUX, _WRAPPER = "xfuser.model_executor.models.transformers.transformer_flux", "xFuserFlux1Transformer2DWrapper"
_WITHOUT_PADDING = without(_FLUX, f"{_WRAPPER}._pad_to_sp_divisible")
"""Condition of patches: xDiT does not pad tokens itself, as a newer one does; then its results count."""


def patches() -> list[Patch]:
    """Return the patches of xDiT's checks, and of a forward without padding."""
    return [
        Patch(
            "xfuser.core.distributed.runtime_state",
            "DiTRuntimeState._check_model_and_parallel_config",
            "zero-padded heads",
            _allow_any_heads,
            ("self", "pipeline", "parallel_config"),
        ),
        Patch(
            "xfuser.core.distributed.runtime_state",
            "DiTRuntimeState._calc_patches_metadata",
            "rows that are not divisible, which matter to PipeFusion only",
            _allow_any_rows,
            ("self",),
            condition=_WITHOUT_PADDING,
        ),
        Patch(
            _FLUX,
            f"{_WRAPPER}.forward",
            "zero-padded tokens; xDiT calls a function that does not exist",
            _pad_tokens,
            condition=_WITHOUT_PADDING,
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


def _allow_any_rows(original: Callable) -> Callable:
    @functools.wraps(original)
    def _calc_patches_metadata(self: Any) -> None:
        session, height = getattr(self, "cocodiff", None), self.input_config.height
        if session is None or session.mesh is None or session.usp_is_unknown or session.model != _WRAPPER:
            original(self)
            return
        multiple = self.vae_scale_factor * self.backbone_patch_size * self.parallel_config.sp_degree
        self.input_config.height = height + -height % multiple
        try:
            original(self)
        finally:
            self.input_config.height = height

    return _calc_patches_metadata


def _pad_tokens(original: Callable) -> Callable:
    @functools.wraps(original)
    def forward(
        self: Any, hidden_states: torch.Tensor, *args: Any, img_ids: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        session, missing = active(), -hidden_states.shape[1] % host.sequence_group().world_size
        if session.mesh is None or session.usp_is_unknown or not missing or img_ids is None:
            return original(self, hidden_states, *args, img_ids=img_ids, **kwargs)
        hidden_states, img_ids = (functional.pad(tensor, (0, 0, 0, missing)) for tensor in (hidden_states, img_ids))
        session.pad_tokens(missing)
        try:
            output = original(self, hidden_states, *args, img_ids=img_ids, **kwargs)
        finally:
            session.padding = 0
        sample = output[0][:, :-missing]
        return (sample, *output[1:]) if isinstance(output, tuple) else output.__class__(sample)

    return forward


def drop_padding(key: torch.Tensor, value: torch.Tensor, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V without the last `padding` tokens."""
    if not padding:
        return key, value
    count = key.shape[SEQUENCE] - padding
    return key[:, :, :count], value[:, :, :count]
