"""Heads and tokens that ranks cannot share alike. xDiT refuses them, or fails; here they are padded with zeros, which
nobody sees: heads attend by themselves, and attention leaves tokens out that were added behind all others."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from xfuser_cocodiff.engine.attention.reshard import HEADS, SEQUENCE, pad_heads
from xfuser_cocodiff.xdit.patching.log import info_once
from xfuser_cocodiff.xdit.patching.patch import Patch
from xfuser_cocodiff.xdit.session import usp_versions
from xfuser_cocodiff.xdit.session.session import active

_FLUX, _WRAPPER = "xfuser.model_executor.models.transformers.transformer_flux", "xFuserFlux1Transformer2DWrapper"
_THEIRS = _FLUX, f"{_WRAPPER}._pad_to_sp_divisible"
"""What it calls, of an xDiT that has it: whose bits are then those to have."""
_JOINT = ("joint_query", "joint_key", "joint_value")


def patches() -> list[Patch]:
    """Rows in the place of refusals."""
    return [
        Patch(
            "xfuser.core.distributed.runtime_state",
            "DiTRuntimeState._check_model_and_parallel_config",
            "heads that do not divide are padded",
            _with_any_heads,
            ("self", "pipeline", "parallel_config"),
        ),
        Patch(
            "xfuser.core.distributed.runtime_state",
            "DiTRuntimeState._calc_patches_metadata",
            "rows that do not divide, of which PipeFusion alone wants to know",
            _with_any_rows,
            ("self",),
            unless_present=_THEIRS,
        ),
        Patch(
            _FLUX,
            f"{_WRAPPER}.forward",
            "tokens that do not divide are padded, where xDiT calls what is not there",
            _with_any_tokens,
            unless_present=_THEIRS,
        ),
    ]


def _with_any_heads(original: Callable) -> Callable:
    @functools.wraps(original)
    def _check_model_and_parallel_config(self: Any, pipeline: Any, parallel_config: Any) -> None:
        degree, heads = parallel_config.sp_config.ulysses_degree, self._get_model_attention_heads(pipeline)
        is_ours = getattr(parallel_config.sp_config, "cocodiff", None) and parallel_config.pp_degree == 1
        is_ours = is_ours and usp_versions.is_known()
        if not is_ours or heads % degree == 0:
            original(self, pipeline, parallel_config)
            return
        most = -(-heads // degree)
        info_once(f"{heads} heads are not divisible by {degree} ranks: zero-padded to {most * degree}")

    return _check_model_and_parallel_config


def _with_any_rows(original: Callable) -> Callable:
    @functools.wraps(original)
    def _calc_patches_metadata(self: Any) -> None:
        session, height = getattr(self, "cocodiff", None), self.input_config.height
        if session is None or session.mesh is None or session.uses_stock_usp or session.model != _WRAPPER:
            original(self)
            return
        multiple = self.vae_scale_factor * self.backbone_patch_size * self.parallel_config.sp_degree
        self.input_config.height = height + -height % multiple
        try:
            original(self)
        finally:
            self.input_config.height = height

    return _calc_patches_metadata


def _with_any_tokens(original: Callable) -> Callable:
    @functools.wraps(original)
    def forward(
        self: Any, hidden_states: torch.Tensor, *args: Any, img_ids: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        from xfuser.core.distributed import get_sequence_parallel_world_size

        session, missing = active(), -hidden_states.shape[1] % get_sequence_parallel_world_size()
        if session.mesh is None or session.uses_stock_usp or not missing or img_ids is None:
            return original(self, hidden_states, *args, img_ids=img_ids, **kwargs)
        hidden_states, img_ids = (functional.pad(tensor, (0, 0, 0, missing)) for tensor in (hidden_states, img_ids))
        session.padding = missing
        try:
            output = original(self, hidden_states, *args, img_ids=img_ids, **kwargs)
        finally:
            session.padding = 0
        sample = output[0][:, :-missing]
        return (sample, *output[1:]) if isinstance(output, tuple) else output.__class__(sample)

    return forward


def can_pad(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether the heads of Q can be padded as those of K and V are."""
    return query.shape[HEADS] % key.shape[HEADS] == 0


def pad_to_divisible(tensors: list[torch.Tensor], given: Any, degree: int) -> tuple[list[torch.Tensor], Any]:
    """Q, K and V, and what USP was given beside them, with heads that a degree divides.

    Args:
        tensors: (B, H, S, D) each; K and V may have fewer heads, each for several of Q.
        given: a dataclass with tensors of text among its fields.
        degree: of Ulysses.
    """
    query, key, value = tensors
    together = query.shape[HEADS] // key.shape[HEADS]
    multiples = degree * together, degree, degree
    texts = {
        name: pad_heads(getattr(given, name), multiple)
        for name, multiple in zip(_JOINT, multiples, strict=True)
        if getattr(given, name) is not None
    }
    even = [pad_heads(tensor, multiple) for tensor, multiple in zip((query, key, value), multiples, strict=True)]
    return even, dataclasses.replace(given, **texts) if texts else given


def drop_padding(key: torch.Tensor, value: torch.Tensor, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V without so many tokens at their end."""
    if not padding:
        return key, value
    kept = key.shape[SEQUENCE] - padding
    return key[:, :, :kept], value[:, :, :kept]
