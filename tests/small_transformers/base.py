"""Base classes of small transformers.

Sizes in shapes: B batch, C channels, F frames, R rows, W columns, N tokens.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn
from xfuser import xFuserArgs
from xfuser.core.distributed import (
    get_runtime_state,
    get_sequence_parallel_rank,
    get_sequence_parallel_world_size,
    get_sp_group,
    init_distributed_environment,
    initialize_model_parallel,
    initialize_runtime_state,
)

from small_models import weights
from tests.sizes import build

STEPS = 2


class Pipeline:
    """The part of a pipeline that the runtime state and the random weights need."""

    vae_scale_factor = 8
    vae_scale_factor_spatial = 8
    vae_scale_factor_temporal = 4

    def __init__(self, **transformers: nn.Module) -> None:
        self.components = transformers
        self.__dict__.update(transformers)


class SmallTransformer:
    """A transformer with initial latents and all other arguments of its forward."""

    latent_shape: tuple[int, ...]
    """Shape of one sample's latents."""
    text, text_width = 12, 16
    """Default number of text tokens, and their channels."""
    model: type[nn.Module]
    sizes: ClassVar[dict[str, Any]] = {}
    """Arguments of the model's class, in addition to :data:`SIZES`."""
    prepare: str | None = None
    """Method of the transformer that xDiT's runner calls after loading."""
    wrapper: type | None = None
    """xDiT's wrapper of a diffusers model; None where the model is a class of xDiT."""
    names: tuple[str, ...] = ("transformer",)
    """Names of the transformers in the pipeline."""
    pipeline_name = "Pipeline"
    """Class name of the pipeline, by which the runtime state identifies some models."""
    end_time = 1000
    """Timestep of the model at time 1."""

    def __init__(self, batch: int = 1, text: int | None = None, dtype: torch.dtype = torch.float32) -> None:
        self.batch, self.text, self.dtype = batch, text or self.text, dtype
        self._generator = torch.Generator().manual_seed(1)
        self.transformers = [self.build() for _ in self.names]
        kind = type(self.pipeline_name, (Pipeline,), {})
        self.pipeline = weights.fill(kind(**dict(zip(self.names, self.transformers, strict=True))), seed=0)
        for transformer in self.transformers:
            transformer.to(dtype)
        self.transformer = self.transformers[0]
        self.conditions = self.condition()
        self.start = self.noise(*self.latent_shape)

    def build(self) -> nn.Module:
        transformer = build(self.model, **self.sizes)
        if self.prepare:
            getattr(transformer, self.prepare)()
        return transformer

    def condition(self) -> dict[str, Any]:
        """Return the arguments of the forward that are the same in all steps."""
        return {"encoder_hidden_states": self.noise(self.text, self.text_width)}

    def ready(self) -> None:
        """Prepare for a new runtime state."""
        if self.wrapper and not isinstance(self.transformer, self.wrapper):
            self.transformer = self.wrapper(self.transformer)

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Return the velocity at times (B,) in (0, 1]."""
        return self.transformer(latents, timestep=self.end_time * time, **self.conditions, return_dict=False)[0]

    @torch.no_grad()
    def denoise(self, steps: int = STEPS, end_step: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Return the latents after Euler steps; `end_step` is called after each."""
        latents = self.start
        for step in range(steps):
            time = torch.full((self.batch,), 1 - step / steps, dtype=self.dtype)
            latents = latents - self.velocity(latents, time) / steps
            end_step()
        return latents

    def noise(self, *shape: int) -> torch.Tensor:
        """Return noise of shape (B, *shape), the same on all ranks."""
        return torch.randn(self.batch, *shape, generator=self._generator).to(self.dtype)

    def ones(self, *shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
        return torch.ones(self.batch, *shape, dtype=dtype)


class RowSharded(SmallTransformer):
    """A model whose pipeline shards latents by rows."""

    inputs: ClassVar[dict[str, Any]] = {}
    """Arguments of the runtime state in addition to the size; with `num_frames` for a video."""

    def ready(self) -> None:
        state = get_runtime_state()
        set_parameters = state.set_video_input_parameters if "num_frames" in self.inputs else state.set_input_parameters
        set_parameters(height=128, width=128, batch_size=self.batch, num_inference_steps=STEPS, **self.inputs)
        super().ready()
        state.set_patched_mode(False)
        [(first, end)] = state.pp_patches_token_start_end_idx_global
        self.conditions |= self.rope(slice(first, end))

    def rope(self, tokens: slice) -> dict[str, Any]:
        """Return the forward's arguments for the rotary embedding of this rank's tokens, if it takes any."""
        return {}

    @property
    def shards_text(self) -> bool:
        """Whether the text is sharded too, in models that join it to the image."""
        return self.text % get_sequence_parallel_world_size() == 0

    def text_shard(self, text: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of text tokens, dim -2, or all of them where text is replicated."""
        return shard_of(text) if self.shards_text else text

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        shard = shard_of(latents)
        # Some models predict the variance too, in the channels after the velocity's.
        velocity = super().velocity(shard.contiguous(), time)[:, : shard.shape[1]]
        return get_sp_group().all_gather(velocity.contiguous(), dim=-2)


def shard_of(whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard along dim -2."""
    return whole.chunk(get_sequence_parallel_world_size(), dim=-2)[get_sequence_parallel_rank()]


def prepare_ranks(rank: int, degree: int) -> None:
    """Create xDiT's process groups."""
    init_distributed_environment(rank=rank, world_size=degree)
    initialize_model_parallel(sequence_parallel_degree=degree, ulysses_degree=degree)


def use(small: SmallTransformer, degree: int, **options: Any) -> None:
    """Start a runtime state with options of the plugin, without their prefix "cocodiff_"; stock's without options."""
    flags = {f"cocodiff_{name}": value for name, value in options.items()} | {"use_cocodiff": bool(options)}
    config, _ = xFuserArgs(model="small", ulysses_degree=degree, **flags).create_config()
    initialize_runtime_state(small.pipeline, config)
    small.ready()
