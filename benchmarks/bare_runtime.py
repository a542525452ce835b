"""Process groups and runtime state of xDiT without a pipeline, for benchmarks of single functions and transformers."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from xfuser_cocodiff.tools.launching.rank_group import process_groups, start
from xfuser_cocodiff.xdit.integration import activation
from xfuser_cocodiff.xdit.patching import patch
from xfuser_cocodiff.xdit.session.session import Session

__all__ = ["process_groups", "start"]

PIXELS_PER_LATENT = 8
"""Pixels per side of a latent: the factor of the VAE, the same in all models of the benchmarks."""


def init_runtime_state(heads: int, text_tokens: int) -> None:
    """Initialize xDiT's runtime state for these ranks.

    Args:
        heads: number of attention heads of the model.
        text_tokens: number of text tokens.
    """
    from xfuser.core.distributed import get_runtime_state

    start_runtime_state(SimpleNamespace(config=SimpleNamespace(num_attention_heads=heads)))
    get_runtime_state().max_condition_sequence_length = text_tokens


def start_runtime_state(transformer: Any, **flags: Any) -> None:
    """Start xDiT's runtime state for a transformer on these ranks, in place of an earlier one.

    Args:
        transformer: anything with the `config` of a transformer.
        flags: further flags of xDiT, such as `use_fp8_comms`.

    Raises:
        RuntimeError: the Ulysses degree does not divide the heads, without the plugin.
    """
    from xfuser import xFuserArgs
    from xfuser.core.distributed import initialize_runtime_state

    ulysses, ring = (group.size() for group in process_groups())
    arguments = xFuserArgs(model="benchmark", ulysses_degree=ulysses, ring_degree=ring, **flags)
    engine_config, _ = arguments.create_config()
    pipeline = SimpleNamespace(transformer=transformer, vae_scale_factor=PIXELS_PER_LATENT)
    initialize_runtime_state(pipeline, engine_config)


def use_session(session: Session) -> None:
    """Run xDiT with a session from now on; `Session()` is stock xDiT."""
    from xfuser.core.distributed.runtime_state import _RUNTIME

    if session.config or session.mesh:
        activation.activate()
        patch.switch_layers(True)  # the session before may have left them to stock
    _RUNTIME.cocodiff = session
    session.select_kernels()


def stock_all_to_all() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return stock xDiT's all-to-all of one tensor: (B, H, S/P, D) to (B, H/P, S, D)."""
    from xfuser.model_executor.layers import usp

    all_to_all = usp._ft_c_input_all_to_all
    return getattr(all_to_all, "__wrapped__", all_to_all)


def flux_transformer(width: int, heads: int, depth: int, text_width: int) -> torch.nn.Module:
    """Return a FLUX.1 transformer in xDiT's wrapper, with the same random weights on every rank.

    Args:
        width: width of the image and text streams, a multiple of 2 * `heads`.
        heads: number of attention heads.
        depth: number of layers; a third of them are double blocks, as in FLUX.1.
        text_width: width of the text embeddings.
    """
    from xfuser.model_executor.models.transformers.transformer_flux import xFuserFlux1Transformer2DWrapper

    head = width // heads
    rest = head - 2 * (head // 3 // 2 * 2)
    torch.manual_seed(0)
    return xFuserFlux1Transformer2DWrapper(
        in_channels=64,
        num_layers=max(1, depth // 3),
        num_single_layers=depth - max(1, depth // 3),
        attention_head_dim=head,
        num_attention_heads=heads,
        joint_attention_dim=text_width,
        pooled_projection_dim=text_width,
        axes_dims_rope=(rest, (head - rest) // 2, (head - rest) // 2),
    ).eval()
