"""Inpainting with a text-to-image pipeline: after each step, the known pixels are restored at the current noise level.

Models differ in how they scale latents, and in the layout that latents have between steps.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

MASKS = ("block", "center")


def mask(name: str, size: int) -> np.ndarray:
    """Return where pixels are hidden, bool (size, size): a block off the center, or the center."""
    hidden = np.zeros((size, size), dtype=bool)
    edge = size // 2 if name == "center" else size * 3 // 8
    start = (size - edge) // 2 if name == "center" else size // 8
    hidden[start : start + edge, start : start + edge] = True
    return hidden


class LatentFormat(NamedTuple):
    """Scale and layout of a pipeline's latents."""

    encode: Callable[[Any, torch.Tensor], torch.Tensor]
    """From pixels (N, 3, height, width) in [-1, 1] to latents (N, C, h, w), scaled as noise is added to them."""
    pack: Callable[[Any, torch.Tensor], torch.Tensor]
    """From latents (N, C, h, w) to the layout that they have between steps."""


def latent_format(pipe: Any) -> LatentFormat | None:
    """Return the latent format of a pipeline, or of xDiT's wrapper of the same name; None if it is unsupported."""
    name = type(pipe).__name__
    return next((known for suffix, known in _FORMATS.items() if name.endswith(suffix)), None)


@torch.no_grad()
def restore_known_pixels(pipe: Any, pictures: np.ndarray, hidden: np.ndarray) -> Callable:
    """Return a callback for the end of a step that restores all pixels but the hidden ones.

    Args:
        pipe: pipeline with a known latent format.
        pictures: original pictures, gray values (N, height, width) in [0, 1].
        hidden: bool (height, width).
    """
    encode, pack = latent_format(pipe)
    pixels = torch.from_numpy(pictures).float()[:, None].expand(-1, 3, -1, -1) * 2 - 1
    original = encode(pipe, pixels.to(pipe.vae.device, pipe.vae.dtype)).float().cpu()
    generators = [torch.Generator().manual_seed(seed) for seed in range(len(original))]
    noise = torch.stack([torch.randn(original.shape[1:], generator=generator) for generator in generators])
    # A latent is hidden if any of its pixels is.
    area = torch.nn.functional.adaptive_avg_pool2d(torch.from_numpy(hidden).float()[None, None], original.shape[-2:])
    is_hidden = pack(pipe, area.gt(0).float().expand(original.shape)).bool()

    def restore(pipe: Any, step: int, timestep: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        sigma, latents = pipe.scheduler.sigmas[step + 1].cpu(), values["latents"]
        noisy = pack(pipe, (1 - sigma) * original + sigma * noise)
        return {**values, "latents": torch.where(is_hidden.to(latents.device), latents, noisy.to(latents))}

    return restore


def _encode(pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
    return pipe.vae.encode(pixels).latent_dist.mode()


def _encode_with_shift(pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
    config = pipe.vae.config
    return (_encode(pipe, pixels) - (config.shift_factor or 0.0)) * config.scaling_factor


def _encode_as_video(pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Encode pictures as videos of one frame, which Qwen-Image's autoencoder expects."""
    latents, config = _encode(pipe, pixels[:, :, None])[:, :, 0], pipe.vae.config
    mean, deviation = (latents.new_tensor(each).view(1, -1, 1, 1) for each in (config.latents_mean, config.latents_std))
    return (latents - mean) / deviation


def _encode_patches(pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Encode pictures for FLUX.2, which scales latents after it has folded 2 x 2 patches into channels."""
    return pipe._encode_vae_image(pixels, None)


def _pack_patches(pipe: Any, latents: torch.Tensor) -> torch.Tensor:
    return pipe._pack_latents(latents.contiguous(), *latents.shape)


_FORMATS = {
    "FluxPipeline": LatentFormat(_encode_with_shift, _pack_patches),
    "Flux2Pipeline": LatentFormat(_encode_patches, lambda pipe, latents: pipe._pack_latents(latents)),
    "StableDiffusion3Pipeline": LatentFormat(_encode_with_shift, lambda pipe, latents: latents),
    "QwenImagePipeline": LatentFormat(_encode_as_video, _pack_patches),
}
"""By the end of the pipeline's class name."""
