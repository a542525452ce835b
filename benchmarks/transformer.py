"""A FLUX transformer of any size, and a denoising step on generated inputs."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks import bare_runtime
from xfuser_cocodiff.engine.topology.devices import CPU

Step = Callable[..., torch.Tensor]
"""A denoising step: takes the position in the run, 0 to 1, and returns the transformer's output."""
_TEXT_TOKENS, _TEXT_WIDTH = 64, 64


@dataclass(frozen=True)
class Shape:
    """Sizes of the transformer."""

    width: int
    depth: int
    tokens: int
    heads: int


def text_tokens(ranks: int) -> int:
    """Return the number of text tokens, rounded up to a multiple of the ranks."""
    return math.ceil(_TEXT_TOKENS / ranks) * ranks


def step(
    shape: Shape,
    compile_with: Callable[[torch.nn.Module], torch.nn.Module] | None = None,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> Step:
    """Return a denoising step on inputs that are equal on every rank.

    Over a run the latents move on a straight line from noise to a fixed target, as in flow matching.

    Args:
        shape: sizes of the transformer.
        compile_with: compiles the transformer, which is not compiled if not given.
        device: device of weights and inputs.
        dtype: their type.
    """
    text = text_tokens(dist.get_world_size())
    bare_runtime.init_runtime_state(shape.heads, text)
    model = bare_runtime.flux_transformer(shape.width, shape.heads, shape.depth, _TEXT_WIDTH).to(device, dtype)
    if compile_with:
        model = compile_with(model)
    side = math.ceil(math.sqrt(shape.tokens))
    positions = torch.stack([torch.zeros(side * side), *torch.cartesian_prod(*[torch.arange(side)] * 2).T], -1)
    generator = torch.Generator().manual_seed(1)

    def draw(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(device, dtype)

    noise, target = (draw(1, shape.tokens, 64) for _ in range(2))
    inputs = {
        "encoder_hidden_states": draw(1, text, _TEXT_WIDTH),
        "pooled_projections": draw(1, _TEXT_WIDTH),
        "img_ids": positions[: shape.tokens].float().to(device),
        "txt_ids": torch.zeros(text, 3, device=device),
    }

    @torch.inference_mode()
    def call(position: float = 0.5) -> torch.Tensor:
        latents = torch.lerp(noise, target, position)
        timestep = torch.full((1,), 1 - position, device=device, dtype=dtype)  # no copy from the host, which would wait
        return model(hidden_states=latents, timestep=timestep, **inputs, return_dict=False)[0]

    return call
