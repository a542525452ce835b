"""Process groups and runtime state of xDiT without a pipeline, for benchmarks of single functions and transformers."""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from xfuser_cocodiff.engine.comm import failure_detection
from xfuser_cocodiff.tools.launching.rank_group import process_groups, start
from xfuser_cocodiff.xdit.integration import activation
from xfuser_cocodiff.xdit.patching import patch
from xfuser_cocodiff.xdit.session.session import Session

__all__ = ["process_groups", "start"]

PIXELS_PER_LATENT = 8
"""Pixels per side of a latent: the factor of the VAE, the same in all models of the benchmarks."""


def start_alone(ranks: int, backend: str = "fake", ring: int = 1) -> None:
    """Start xDiT on rank 0 of a group whose collectives return at once, on a backend for that.

    Args:
        ranks: number of ranks.
        backend: PyTorch's `fake`, or that of an emulated accelerator.
        ring: ring degree.
    """
    os.environ.update(RANK="0", WORLD_SIZE=str(ranks), LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    dist.init_process_group(backend, store=FakeStore(), rank=0, world_size=ranks)
    new_group = dist.new_group
    # xDiT and the plugin also ask for gloo, which would wait for other processes.
    dist.new_group = lambda members=None, *_, **__: new_group(members, backend=backend)
    failure_detection.start_heartbeat = lambda: None  # there is no other rank to watch
    start(ring=ring)


def init_runtime_state(heads: int, text_tokens: int) -> None:
    """Initialize xDiT's runtime state for these ranks.

    Args:
        heads: number of attention heads of the model.
        text_tokens: number of text tokens.
    """
    from xfuser.core.distributed import get_runtime_state

    start_runtime_state(SimpleNamespace(config=SimpleNamespace(num_attention_heads=heads)))
    get_runtime_state().max_condition_sequence_length = text_tokens


def start_runtime_state(transformer: Any) -> None:
    """Start xDiT's runtime state for a transformer on these ranks, in place of an earlier one.

    Args:
        transformer: anything with the `config` of a transformer.

    Raises:
        RuntimeError: the Ulysses degree does not divide the heads, without the plugin.
    """
    from xfuser import xFuserArgs
    from xfuser.core.distributed import initialize_runtime_state

    ulysses, ring = (group.size() for group in process_groups())
    arguments = xFuserArgs(model="benchmark", ulysses_degree=ulysses, ring_degree=ring)
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
