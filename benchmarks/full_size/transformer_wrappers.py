"""xDiT's wrappers of transformers without a pipeline, set up as its runners and pipelines do."""

import importlib
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks import bare_runtime

_TRANSFORMERS = "xfuser.model_executor.models.transformers"
_CLASSES = {
    "flux.1-dev": (f"{_TRANSFORMERS}.transformer_flux", "xFuserFlux1Transformer2DWrapper"),
    "flux.2-dev": (f"{_TRANSFORMERS}.transformer_flux2", "xFuserFlux2Transformer2DWrapper"),
    "sd3.5-large": ("diffusers", "SD3Transformer2DModel"),
    "qwen-image": (f"{_TRANSFORMERS}.transformer_qwen", "xFuserQwenImageTransformerWrapper"),
    "hunyuanvideo": (f"{_TRANSFORMERS}.transformer_hunyuan_video", "xFuserHunyuanVideoTransformer3DWrapper"),
    "wan2.1-14b": (f"{_TRANSFORMERS}.transformer_wan", "xFuserWanTransformer3DWrapper"),
}
"""Module and class of each model's transformer. The wrapper of SD3.5 encloses the class of diffusers."""


def preload(name: str) -> None:
    """Import xDiT and the class of a model, for processes that are forked from this one."""
    importlib.import_module("xfuser.core.distributed")
    importlib.import_module(_CLASSES[name][0])


def construct(name: str, sizes: Mapping[str, Any]) -> torch.nn.Module:
    """Return a transformer, with weights on the default device.

    Args:
        name: name of the model.
        sizes: arguments of its class, as in `transformer/config.json` of its weights.
    """
    module, symbol = _CLASSES[name]
    transformer = getattr(importlib.import_module(module), symbol)(**sizes)
    if name == "hunyuanvideo":  # its constructor has the attention of diffusers, without all-to-alls
        transformer.install_xdit_attention_processors()
    return transformer


def wrap(name: str, transformer: torch.nn.Module) -> torch.nn.Module:
    """Start a runtime state for a transformer, and return the transformer ready for the sequence-parallel group.

    Heads that are not divisible by the Ulysses degree pass xDiT's check, for a session that zero-pads them.

    Args:
        name: name of the model.
        transformer: a transformer from :func:`construct`.
    """
    degree, heads = bare_runtime.process_groups()[0].size(), transformer.config.num_attention_heads
    # As xDiT's runner of Z-Image does, whose attention zero-pads too: the config is for the check only.
    transformer.register_to_config(num_attention_heads=-(-heads // degree) * degree)
    bare_runtime.start_runtime_state(transformer)
    if name != "sd3.5-large":
        return transformer
    from xfuser.model_executor.models.transformers.transformer_sd3 import xFuserSD3Transformer2DWrapper

    return xFuserSD3Transformer2DWrapper(transformer)


def set_text_tokens(text_tokens: int) -> None:
    """Set the number of text tokens in the runtime state, for wrappers that shard their inputs themselves."""
    from xfuser.core.distributed import get_runtime_state

    state = get_runtime_state()
    state.max_condition_sequence_length, state.split_text_embed_in_sp = text_tokens, True


def shard_inputs(
    latents: torch.Tensor, text: torch.Tensor, height: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Set the size of the image in the runtime state, and return this rank's shards as the pipeline of SD3.5 does.

    Args:
        latents: latents of shape (B, C, H, W), sharded by rows.
        text: text embeddings of shape (B, N, D), replicated where N is not divisible by the degree.
        height: pixels per column.
        width: pixels per row.

    Raises:
        ValueError: the rows are not divisible by the degree.
    """
    from xfuser import xFuserStableDiffusion3Pipeline as Pipeline
    from xfuser.core.distributed import get_runtime_state

    get_runtime_state().set_input_parameters(height=height, width=width, batch_size=len(latents))
    pipeline = SimpleNamespace(_chunk_text_for_sp=partial(Pipeline._chunk_text_for_sp, None))
    return Pipeline._init_sync_pipeline(pipeline, latents, text)
