"""Inpainting with every family: known pixels are restored, hidden pixels come from the model."""

import numpy as np
import pytest
import torch

from tests import ranks
from tests.quick import slow_but
from xfuser_cocodiff.lab.comparison import inpainting
from xfuser_cocodiff.lab.launching.single_rank import SingleRankPipeline
from xfuser_cocodiff.lab.models import slices

SIZE, STEPS = 64, 3
MODELS = ("FLUX.1-dev", "FLUX.2-dev", "SD3.5", "Qwen-Image")


def run(pipeline: SingleRankPipeline, latents: list[torch.Tensor] | None = None, **more: object) -> np.ndarray:
    """Run two seeds, append the latents after each step to `latents`, and return the pictures."""
    if latents is not None:
        restore = more["callback_on_step_end"]

        def collect(pipe: object, step: int, timestep: object, values: dict) -> dict:
            restored = restore(pipe, step, timestep, dict(values))
            latents.append(restored["latents"].clone())
            return restored

        more["callback_on_step_end"] = collect
    generators = [torch.Generator().manual_seed(seed) for seed in range(2)]
    size = {"height": SIZE, "width": SIZE, "output_type": "np"}
    return pipeline(["a cat", "a rocket"], STEPS, 32, generator=generators, **size, **more).images


@torch.no_grad()
def through_autoencoder(pipeline: SingleRankPipeline, pictures: np.ndarray) -> np.ndarray:
    """Encode and decode pictures with the pipeline's autoencoder alone."""
    pixels = torch.from_numpy(pictures).float()[:, None].expand(-1, 3, -1, -1) * 2 - 1
    pixels = pixels[:, :, None] if "Qwen" in type(pipeline.pipe).__name__ else pixels
    decoded = pipeline.pipe.vae.decode(pipeline.pipe.vae.encode(pixels).latent_dist.mode(), return_dict=False)[0]
    decoded = decoded[:, :, 0] if decoded.ndim == 5 else decoded
    return (decoded / 2 + 0.5).clamp(0, 1).movedim(1, -1).numpy()


def inpaint(rank: int, model: str) -> None:
    pipeline = SingleRankPipeline(model, torch.float32)
    pipeline.configure(None)
    if model == "Qwen-Image":  # the small model has no scale
        channels = len(pipeline.pipe.vae.config.latents_mean)
        pipeline.pipe.vae.register_to_config(
            latents_mean=[0.5] * channels, latents_std=[2.0 + i for i in range(channels)]
        )
    kinds = list(slices.KINDS)[:2]
    pictures = np.stack([slices.draw(kind, SIZE, np.random.default_rng(0)) for kind in kinds])
    generated = run(pipeline)

    def callback(hidden: np.ndarray) -> dict:
        return {"callback_on_step_end": inpainting.restore_known_pixels(pipeline.pipe, pictures, hidden)}

    nothing, everything = np.zeros((SIZE, SIZE), dtype=bool), np.ones((SIZE, SIZE), dtype=bool)
    assert np.array_equal(run(pipeline, **callback(everything)), generated)
    assert np.abs(run(pipeline, **callback(nothing)) - through_autoencoder(pipeline, pictures)).max() < 1e-4
    all_known: list[torch.Tensor] = []
    run(pipeline, all_known, **callback(nothing))
    half_known: list[torch.Tensor] = []
    run(pipeline, half_known, **callback(inpainting.mask("center", SIZE)))
    for latents, expected in zip(half_known, all_known, strict=True):  # equal outside the mask
        fraction = (latents != expected).float().mean().item()
        assert fraction == pytest.approx(0.25, abs=0.02)
    noises = [(latents - all_known[-1]).std().item() for latents in all_known]
    assert noises[0] > noises[1] > noises[2] == 0


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("model", slow_but(["Qwen-Image"], MODELS))
def test_known_pixels_are_kept(model: str) -> None:
    ranks.run(inpaint, 1, model)
