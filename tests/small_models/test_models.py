"""Tests of the small models, their tokenizers and their cache, in one process without xDiT."""

import sys
from pathlib import Path

import numpy as np
import pytest
import skimage.data
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from transformers import AutoTokenizer

from small_models import __main__ as command
from small_models import captions, hub, tokenizers
from tests.quick import slow_but

# The models


@pytest.mark.parametrize("name", slow_but(["FLUX.1-dev"], ["FLUX.1-dev", "SD3.5"]))
def test_trained_image_models_generate_their_captions(name, tmp_path):
    (snapshot,) = hub.write_cache(tmp_path, [name]).values()
    pipe = DiffusionPipeline.from_pretrained(snapshot)
    pipe.set_progress_bar_config(disable=True)
    options = {"height": 128, "width": 128, "num_inference_steps": 12, "max_sequence_length": 32, "output_type": "np"}
    photos = {file: photo(file) for file in captions.PHOTOS}
    for file, caption in captions.PHOTOS.items():
        image = pipe(prompt=f"a photo of {caption}", generator=torch.Generator().manual_seed(0), **options).images[0]
        generated = coarse(image)
        correlation = {other: np.corrcoef(generated, coarse(original))[0, 1] for other, original in photos.items()}
        assert max(correlation, key=correlation.get) == file, (caption, correlation)
        assert correlation[file] > 0.5


def photo(file: str) -> np.ndarray:
    """Return a training photo of shape (128, 128, 3) in [0, 1]."""
    image = Image.open(Path(skimage.data.__file__).parent / file).convert("RGB")
    edge = min(image.size)
    left, top = (image.width - edge) // 2, (image.height - edge) // 2
    return np.asarray(image.resize((128, 128), Image.BOX, (left, top, left + edge, top + edge))) / 255


def coarse(image: np.ndarray) -> np.ndarray:
    """Return an image downsampled to 16 x 16 pixels without its mean color, flattened."""
    blocks = image.reshape(16, 8, 16, 8, 3).mean((1, 3))
    return (blocks - blocks.mean((0, 1))).ravel()


# The tokenizers


@pytest.mark.parametrize("build", [tokenizers.clip, tokenizers.t5, tokenizers.qwen2])
def test_tokenizer_round_trips(build, tmp_path):
    tokenizer, text = build(), "a photo of a small dog, at night! xyzzy 42"
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(text).input_ids
    assert loaded(text).input_ids == ids and build()(text).input_ids == ids
    decoded = tokenizer.decode(ids, skip_special_tokens=True)
    assert decoded.replace(" ", "") == text.replace(" ", "")


# The cache


@pytest.fixture
def tiny(monkeypatch) -> hub.SmallModel:
    """Return a model of one file, registered as SD3.5."""

    def write(folder: Path) -> None:
        folder.mkdir()
        (folder / "model_index.json").write_text("{}")

    model = hub.SmallModel("some/tiny", write)
    monkeypatch.setitem(hub.REGISTRY, "SD3.5", model)
    return model


def test_real_model_is_not_replaced(tmp_path, tiny):
    folder, commit = tmp_path / "hub" / "models--some--tiny", "1" * 40
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    with pytest.raises(FileExistsError, match="real some/tiny"):
        hub.write_cache(tmp_path, ["SD3.5"])
    assert (folder / "refs" / "main").read_text() == commit


def test_damaged_snapshot_is_replaced(tmp_path, tiny):
    (snapshot,) = hub.write_cache(tmp_path, ["SD3.5"]).values()
    (snapshot / "model_index.json").unlink()
    hub.write_cache(tmp_path, ["SD3.5"])
    assert (snapshot / "model_index.json").exists()


def test_interrupted_write_leaves_no_model(tmp_path, tiny, monkeypatch):
    def interrupt(folder: Path) -> None:
        tiny.write(folder)
        raise KeyboardInterrupt

    monkeypatch.setitem(hub.REGISTRY, "SD3.5", hub.SmallModel(tiny.repo, interrupt))
    with pytest.raises(KeyboardInterrupt):
        hub.write_cache(tmp_path, ["SD3.5"])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_unknown_name_is_an_error_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"'FLUX\.3'.*FLUX.1-dev, FLUX.2-dev, SD3.5, Qwen-Image"):
        hub.write_cache(tmp_path / "new", ["SD3.5", "FLUX.3"])
    assert not (tmp_path / "new").exists()


def test_the_command_writes_a_model_by_name(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["small_models", "--out", str(tmp_path), "SD3.5"])
    assert command.main() == 0
    assert f"HF_HOME={tmp_path}" in capsys.readouterr().out
    assert [each.name for each in (tmp_path / "hub").iterdir()] == ["models--stabilityai--stable-diffusion-3.5-large"]
