"""Tests that the results of the small models depend on all inputs, in one process without xDiT."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image, ImageOps

from small_models import hub
from tests.quick import slow_but

SMALL = {"height": 128, "width": 128}
LARGE = {"height": 256, "width": 256}
VIDEO = {**SMALL, "num_frames": 9}
SHAPES: dict[str, dict[str, int]] = {
    "FLUX.2-dev": SMALL,
    "SD3.5": SMALL,
    "Qwen-Image": SMALL,
    "FLUX.1-Kontext-dev": LARGE,
    "Qwen-Image-Edit": LARGE,
    "FLUX.2-klein-4B": SMALL,
    "Lumina2": SMALL,
    "Wan2.1-T2V": VIDEO,
    "Wan2.2-T2V": VIDEO,
    "Hunyuanvideo-1.5": VIDEO,
}


def result(pipe: DiffusionPipeline, prompt: str = "a photo of a cat", seed: int = 0, **more: Any) -> np.ndarray:
    """Return the latents, or images, after two steps."""
    generator = torch.Generator().manual_seed(seed)
    output = pipe(prompt=prompt, generator=generator, num_inference_steps=2, output_type="latent", **more)
    return output[0].float().numpy()


@pytest.mark.parametrize("name", slow_but(["SD3.5"], SHAPES))
def test_result_depends_on_all_inputs(name: str, tmp_path: Path) -> None:
    (snapshot,) = hub.write_cache(tmp_path, [name]).values()
    pipe = DiffusionPipeline.from_pretrained(snapshot)
    pipe.set_progress_bar_config(disable=True)
    inputs: dict[str, Any] = dict(SHAPES[name])
    changes: list[dict[str, Any]] = [{"prompt": "a slice of blood vessels"}, {"seed": 1}]
    if hub.REGISTRY[name].takes_image:
        inputs["image"] = Image.open(tmp_path / hub.INPUT_IMAGE)
        changes.append({"image": ImageOps.invert(inputs["image"])})
    if name == "Qwen-Image-Edit":
        inputs |= {"negative_prompt": " ", "true_cfg_scale": 4.0}
    first = result(pipe, **inputs)
    assert np.isfinite(first).all() and first.std() > 0.1
    np.testing.assert_array_equal(first, result(pipe, **inputs))
    for change in changes:
        assert np.abs(result(pipe, **{**inputs, **change}) - first).max() > 0.1, change


def test_input_image_is_written_for_models_that_take_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for takes_image in (False, True):
        monkeypatch.setitem(hub.REGISTRY, "Lumina2", hub.SmallModel("some/tiny", Path.mkdir, takes_image))
        hub.write_cache(tmp_path, ["Lumina2"])
        assert (tmp_path / hub.INPUT_IMAGE).exists() == takes_image
    image = Image.open(tmp_path / hub.INPUT_IMAGE)
    assert (image.size, image.mode) == ((256, 256), "RGB") and np.asarray(image).std() > 20
