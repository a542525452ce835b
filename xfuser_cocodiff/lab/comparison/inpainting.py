"""Inpainting by a pipeline that generates: after each step, what is known is put back with the noise that is left then.

Models differ in how latents are scaled, and in how a pipeline has them between steps.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

MASKS = ("block", "center")


def mask(name: str, size: int) -> np.ndarray:
    """Where pixels are to be found: a block off the center, or the center."""
    hidden = np.zeros((size, size), dtype=bool)
    edge = size // 2 if name == "center" else size * 3 // 8
    start = (size - edge) // 2 if name == "center" else size // 8
    hidden[start : start + edge, start : start + edge] = True
    return hidden


class Layout(NamedTuple):
    """How a pipeline has pictures."""

    encode: Callable[[Any, torch.Tensor], torch.Tensor]
    """Its latents (N, C, h, w), scaled as they are noised, of pixels (N, 3, height, width) from -1 to 1."""
    pack: Callable[[Any, torch.Tensor], torch.Tensor]
    """Latents, or what is known of each of their values, as they are between steps."""


def layout(pipe: Any) -> Layout | None:
    """That of a pipeline, or of xDiT's of the same name; None where it is not known."""
    return next((found for name, found in _LAYOUTS.items() if type(pipe).__name__.endswith(name)), None)


@torch.no_grad()
def keep_known(pipe: Any, pictures: np.ndarray, hidden: np.ndarray) -> Callable:
    """A callback for the end of a step that leaves only hidden pixels to the model.

    Args:
        pipe: which has a layout.
        pictures: the true ones, grey values (N, height, width) from 0 to 1.
        hidden: bool (height, width).
    """
    encode, pack = layout(pipe)
    pixels = torch.from_numpy(pictures).float()[:, None].expand(-1, 3, -1, -1) * 2 - 1
    known = encode(pipe, pixels.to(pipe.vae.device, pipe.vae.dtype)).float().cpu()
    generators = [torch.Generator().manual_seed(seed) for seed in range(len(known))]
    noise = torch.stack([torch.randn(known.shape[1:], generator=generator) for generator in generators])
    # A latent is to be found if any of its pixels is.
    area = torch.nn.functional.adaptive_avg_pool2d(torch.from_numpy(hidden).float()[None, None], known.shape[-2:])
    wanted = pack(pipe, area.gt(0).float().expand(known.shape)).bool()

    def keep(pipe: Any, step: int, timestep: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        sigma, latents = pipe.scheduler.sigmas[step + 1].cpu(), values["latents"]
        noisy = pack(pipe, (1 - sigma) * known + sigma * noise)
        return {**values, "latents": torch.where(wanted.to(latents.device), latents, noisy.to(latents))}

    return keep


def _mode(pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
    return pipe.vae.encode(pixels).latent_dist.mode()


def _shifted(pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
    config = pipe.vae.config
    return (_mode(pipe, pixels) - (config.shift_factor or 0.0)) * config.scaling_factor


def _of_a_video(pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Qwen-Image's autoencoder is one of videos; a picture is a frame."""
    latents, config = _mode(pipe, pixels[:, :, None])[:, :, 0], pipe.vae.config
    mean, deviation = (latents.new_tensor(each).view(1, -1, 1, 1) for each in (config.latents_mean, config.latents_std))
    return (latents - mean) / deviation


def _of_patches(pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
    """FLUX.2 scales after it has made channels of 2 x 2 latents."""
    return pipe._encode_vae_image(pixels, None)


def _in_patches(pipe: Any, latents: torch.Tensor) -> torch.Tensor:
    return pipe._pack_latents(latents.contiguous(), *latents.shape)


_LAYOUTS = {
    "FluxPipeline": Layout(_shifted, _in_patches),
    "Flux2Pipeline": Layout(_of_patches, lambda pipe, latents: pipe._pack_latents(latents)),
    "StableDiffusion3Pipeline": Layout(_shifted, lambda pipe, latents: latents),
    "QwenImagePipeline": Layout(_of_a_video, _in_patches),
}
