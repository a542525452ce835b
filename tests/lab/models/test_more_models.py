"""The small models: what comes of them depends on all that goes in. One process, without xDiT."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image, ImageOps

from tests.quick import slow_but
from xfuser_cocodiff.lab.models import hub, qwen_image, tokenizers

SMALL = {"height": 128, "width": 128}
EDITED = {"height": 256, "width": 256}
VIDEO = {**SMALL, "num_frames": 9}
SHAPES: dict[str, dict[str, int]] = {
    "FLUX.2-dev": SMALL,
    "SD3.5": SMALL,
    "Qwen-Image": SMALL,
    "FLUX.1-Kontext-dev": EDITED,
    "Qwen-Image-Edit": EDITED,
    "FLUX.2-klein-4B": SMALL,
    "Lumina2": SMALL,
    "Wan2.1-T2V": VIDEO,
    "Wan2.2-T2V": VIDEO,
    "Hunyuanvideo-1.5": VIDEO,
}


def result(pipe: DiffusionPipeline, prompt: str = "a photo of a cat", seed: int = 0, **more: Any) -> np.ndarray:
    """The latents, or pictures, that two steps end in."""
    generator = torch.Generator().manual_seed(seed)
    output = pipe(prompt=prompt, generator=generator, num_inference_steps=2, output_type="latent", **more)
    return output[0].float().numpy()


@pytest.mark.parametrize("name", slow_but(["SD3.5"], SHAPES))
def test_result_depends_on_all_that_goes_in(name: str, tmp_path: Path) -> None:
    (snapshot,) = hub.write_cache(tmp_path, [name]).values()
    pipe = DiffusionPipeline.from_pretrained(snapshot)
    pipe.set_progress_bar_config(disable=True)
    inputs: dict[str, Any] = dict(SHAPES[name])
    others: list[dict[str, Any]] = [{"prompt": "a slice of blood vessels"}, {"seed": 1}]
    if hub.REGISTRY[name].takes_image:
        inputs["image"] = Image.open(tmp_path / hub.INPUT_IMAGE)
        others.append({"image": ImageOps.invert(inputs["image"])})
    if name == "Qwen-Image-Edit":
        inputs |= {"negative_prompt": " ", "true_cfg_scale": 4.0}
    first = result(pipe, **inputs)
    assert np.isfinite(first).all() and first.std() > 0.1
    np.testing.assert_array_equal(first, result(pipe, **inputs))
    for other in others:
        assert np.abs(result(pipe, **{**inputs, **other}) - first).max() > 0.1, other


def test_input_image_comes_with_models_that_edit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for edits in (False, True):
        monkeypatch.setitem(hub.REGISTRY, "Lumina2", hub.SmallModel("some/tiny", Path.mkdir, edits))
        hub.write_cache(tmp_path, ["Lumina2"])
        assert (tmp_path / hub.INPUT_IMAGE).exists() == edits
    image = Image.open(tmp_path / hub.INPUT_IMAGE)
    assert (image.size, image.mode) == ((256, 256), "RGB") and np.asarray(image).std() > 20


def test_the_text_encoder_of_qwen_image_edit_sees_the_image() -> None:
    tokenizer = tokenizers.qwen2(image_token="<|image_pad|>")
    image = Image.new("RGB", (1024, 1024))
    read = qwen_image.processor(tokenizer)(text=["a <|image_pad|> cat"], images=image, return_tensors="pt")
    assert read["input_ids"].eq(tokenizer.image_token_id).sum() == qwen_image.VISION_TOKENS
