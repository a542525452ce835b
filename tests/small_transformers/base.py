"""What small transformers have in common.

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

from tests.sizes import build
from xfuser_cocodiff.lab.models import weights

STEPS = 2


class Pipeline:
    """What the runtime state and the random weights ask of a pipeline."""

    vae_scale_factor = 8
    vae_scale_factor_spatial = 8
    vae_scale_factor_temporal = 4

    def __init__(self, **transformers: nn.Module) -> None:
        self.components = transformers
        self.__dict__.update(transformers)


class SmallTransformer:
    """A transformer with latents to start from and everything else that its forward takes."""

    latent_shape: tuple[int, ...]
    """Of one sample."""
    text, text_width = 12, 16
    """Text tokens where a case does not say, and the channels of each."""
    model: type[nn.Module]
    sizes: ClassVar[dict[str, Any]] = {}
    """Arguments of the model's class beside :data:`SIZES`."""
    prepare: str | None = None
    """Method of the transformer that xDiT's runner calls before it is used."""
    wrapper: type | None = None
    """xDiT's wrapper around a diffusers model; None where the model is xDiT's own class."""
    names: tuple[str, ...] = ("transformer",)
    """Of the transformers."""
    pipeline_name = "Pipeline"
    """By which the runtime state knows some models."""
    end_time = 1000
    """The model's name for time 1."""

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
        """Arguments of the forward that stay the same over the steps."""
        return {"encoder_hidden_states": self.noise(self.text, self.text_width)}

    def ready(self) -> None:
        """Prepare for the runtime state that has just been initialised."""
        if self.wrapper and not isinstance(self.transformer, self.wrapper):
            self.transformer = self.wrapper(self.transformer)

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Direction of the next step, at times (B,) in (0, 1]."""
        return self.transformer(latents, timestep=self.end_time * time, **self.conditions, return_dict=False)[0]

    @torch.no_grad()
    def denoise(self, steps: int = STEPS, end_step: Callable[[], None] = lambda: None) -> torch.Tensor:
        """Latents after plain Euler steps, of which each end is told."""
        latents = self.start
        for step in range(steps):
            time = torch.full((self.batch,), 1 - step / steps, dtype=self.dtype)
            latents = latents - self.velocity(latents, time) / steps
            end_step()
        return latents

    def noise(self, *shape: int) -> torch.Tensor:
        """Noise of shape (B, *shape), the same on every rank."""
        return torch.randn(self.batch, *shape, generator=self._generator).to(self.dtype)

    def ones(self, *shape: int, dtype: torch.dtype = torch.long) -> torch.Tensor:
        return torch.ones(self.batch, *shape, dtype=dtype)


class RowSliced(SmallTransformer):
    """A model whose pipeline gives each rank a band of latent rows."""

    inputs: ClassVar[dict[str, Any]] = {}
    """What the runtime state is told beside the size of a picture; with frames, of a video."""

    def ready(self) -> None:
        state = get_runtime_state()
        tell = state.set_video_input_parameters if "num_frames" in self.inputs else state.set_input_parameters
        tell(height=128, width=128, batch_size=self.batch, num_inference_steps=STEPS, **self.inputs)
        super().ready()
        state.set_patched_mode(False)
        [(first, end)] = state.pp_patches_token_start_end_idx_global
        self.conditions |= self.rope(slice(first, end))

    def rope(self, tokens: slice) -> dict[str, Any]:
        """The forward's argument for rotary embedding of this rank's tokens, where it takes one."""
        return {}

    @property
    def splits_text(self) -> bool:
        """Whether text is divided among ranks too, by models that join it to the image."""
        return self.text % get_sequence_parallel_world_size() == 0

    def own_text(self, text: torch.Tensor) -> torch.Tensor:
        """What this rank is given of text, whose tokens lie along the last dim but one."""
        return band_of(text) if self.splits_text else text

    def velocity(self, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        band = band_of(latents)
        # Some predict the variance too, in channels after the velocity's.
        velocity = super().velocity(band.contiguous(), time)[:, : band.shape[1]]
        return get_sp_group().all_gather(velocity.contiguous(), dim=-2)


def band_of(whole: torch.Tensor) -> torch.Tensor:
    """This rank's part, along the last dim but one."""
    return whole.chunk(get_sequence_parallel_world_size(), dim=-2)[get_sequence_parallel_rank()]


def prepare_ranks(rank: int, degree: int, cfg: int = 1) -> None:
    """Make xDiT's groups of all ranks, one for Ulysses on each branch of guidance."""
    init_distributed_environment(rank=rank, world_size=degree * cfg)
    initialize_model_parallel(
        classifier_free_guidance_degree=cfg, sequence_parallel_degree=degree, ulysses_degree=degree
    )


def use(small: SmallTransformer, degree: int, compiled: bool = False, **options: Any) -> None:
    """Begin a runtime state with these options of the plugin, whose names here lack "cocodiff_"; stock's with none."""
    flags = {f"cocodiff_{name}": value for name, value in options.items()} | {"use_cocodiff": bool(options)}
    config, _ = xFuserArgs(model="small", ulysses_degree=degree, use_torch_compile=compiled, **flags).create_config()
    initialize_runtime_state(small.pipeline, config)
    small.ready()
