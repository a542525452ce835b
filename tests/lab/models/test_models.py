"""The small models of the paper's families: real pipelines, found offline under the names of the real ones.

One process, without xDiT.
"""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest
import skimage.data
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from torch.nn import functional
from transformers import AutoTokenizer

from xfuser_cocodiff.lab.models import captions, flux2, hub, tokenizers

RANDOM = ["FLUX.2-dev", "SD3.5", "Qwen-Image"]
PROMPT = "a photo of a cat"


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """A cache of models with random weights."""
    out = tmp_path_factory.mktemp("cache")
    hub.write_cache(out, RANDOM)
    return out


def load(out: Path, name: str) -> DiffusionPipeline:
    repo = hub.REGISTRY[name].repo
    pipe = DiffusionPipeline.from_pretrained(repo, cache_dir=out / "hub", local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def picture(pipe: DiffusionPipeline, prompt: str = PROMPT, seed: int = 0, steps: int = 2, **more: int) -> np.ndarray:
    """A picture of shape (128, 128, 3) in [0, 1]."""
    generator = torch.Generator().manual_seed(seed)
    options = {"height": 128, "width": 128, "num_inference_steps": steps, "generator": generator, **more}
    return pipe(prompt=prompt, output_type="np", **options).images[0]


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    return float(-10 * np.log10(np.mean((a - b) ** 2) + 1e-20))


def stamps(folder: Path) -> dict[Path, tuple[int, int]]:
    files = (path for path in folder.rglob("snapshots/*/**/*") if path.is_file())
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


# The models


@pytest.mark.parametrize("name", RANDOM)
def test_picture_depends_on_attention(out, name, monkeypatch):
    pipe = load(out, name)
    first, exact, denoise = picture(pipe), functional.scaled_dot_product_attention, pipe.transformer.forward

    def denoise_with_half(*args, **kwargs):
        with monkeypatch.context() as patch:
            patch.setattr(
                functional, "scaled_dot_product_attention", lambda *args, **kwargs: exact(*args, **kwargs) / 2
            )
            return denoise(*args, **kwargs)

    pipe.transformer.forward = denoise_with_half
    assert psnr(first, picture(pipe)) < 25


def test_shipped_flux1_paints(tmp_path):
    hub.write_cache(tmp_path, ["FLUX.1-dev"])
    pipe = load(tmp_path, "FLUX.1-dev")
    photos = {file: photo(file) for file in captions.PHOTOS}
    for file, name in captions.PHOTOS.items():
        painted = coarse(picture(pipe, f"a photo of {name}", steps=12, max_sequence_length=32))
        likeness = {other: np.corrcoef(painted, coarse(original))[0, 1] for other, original in photos.items()}
        assert max(likeness, key=likeness.get) == file, (name, likeness)
        assert likeness[file] > 0.5


def test_shipped_wan_films(tmp_path):
    """Its videos have the shades of what was asked for, and move as much."""
    hub.write_cache(tmp_path, ["Wan2.1-T2V"])
    draw = runpy.run_path(Path(__file__).parents[3] / "scripts/volumes.py")["draw"]  # what it was trained on
    wanted = {
        kind: np.stack([draw(kind, 64, np.random.default_rng(seed)) for seed in range(8)]) for kind in captions.VOLUMES
    }
    pipe, inputs = load(tmp_path, "Wan2.1-T2V"), {"height": 128, "width": 128, "num_frames": 9}
    prompts = [f"a video of {name}" for name in captions.VOLUMES.values()]
    generators = [torch.Generator().manual_seed(seed) for seed in range(len(prompts))]
    made = pipe(
        prompt=prompts, num_inference_steps=8, generator=generators, output_type="np", max_sequence_length=32, **inputs
    )
    for kind, video in zip(captions.VOLUMES, made.frames.mean(-1), strict=True):
        strangeness = {other: np.abs(shades(video) - shades(real)).mean() for other, real in wanted.items()}
        assert min(strangeness, key=strangeness.get) == kind, (kind, strangeness)
        assert 0.3 < motion(video) / motion(wanted[kind]) < 3, kind


def shades(videos: np.ndarray) -> np.ndarray:
    """Its grey values, in order."""
    return np.quantile(videos, np.linspace(0, 1, 21))


def motion(videos: np.ndarray) -> float:
    """How much one frame differs from the next."""
    return float(np.abs(np.diff(videos, axis=-3)).mean())


@pytest.mark.parametrize("shipped", hub.SHIPPED.values(), ids=hub.SHIPPED)
def test_shipped_weights_are_small_and_say_how_far_they_were_trained(shipped):
    assert sum(file.stat().st_size for file in shipped.rglob("*")) <= 15e6
    assert json.loads((shipped / "training.json").read_text())["flow_matching_loss"] < 0.4


def photo(file: str) -> np.ndarray:
    """One of the photos that the model was trained on, of shape (128, 128, 3) in [0, 1]."""
    image = Image.open(Path(skimage.data.__file__).parent / file).convert("RGB")
    edge = min(image.size)
    left, top = (image.width - edge) // 2, (image.height - edge) // 2
    return np.asarray(image.resize((128, 128), Image.BOX, (left, top, left + edge, top + edge))) / 255


def coarse(image: np.ndarray) -> np.ndarray:
    """What is left of a picture at 16 x 16 pixels, without its mean colour."""
    blocks = image.reshape(16, 8, 16, 8, 3).mean((1, 3))
    return (blocks - blocks.mean((0, 1))).ravel()


# The tokenizers


@pytest.mark.parametrize("build", [tokenizers.clip, tokenizers.t5, tokenizers.qwen2])
def test_tokenizer_round_trips(build, tmp_path):
    tokenizer, text = build(), "a photo of a small dog, at night! xyzzy 42"
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    ids = tokenizer(text).input_ids
    assert again(text).input_ids == ids and build()(text).input_ids == ids
    spoken = tokenizer.decode(ids, skip_special_tokens=True)
    assert spoken.replace(" ", "") == text.replace(" ", "")


def test_flux2_prompt_comes_first(out):
    """The system message is left out: eight tokens are enough for two captions to differ."""
    pipe = load(out, "FLUX.2-dev")
    cat, moon = (pipe.encode_prompt(text, max_sequence_length=8)[0] for text in (PROMPT, "a photo of the moon"))
    assert cat.shape == (1, 8, flux2.TEXT_STATES * flux2.TEXT_WIDTH) and not torch.allclose(cat, moon)


def test_qwen_image_cuts_off_its_opening_exactly(out):
    pipe = load(out, "Qwen-Image")
    opening, _ = pipe.prompt_template_encode.split("{}")
    assert len(pipe.tokenizer(opening).input_ids) == pipe.prompt_template_encode_start_idx


# The cache


def test_writing_again_changes_nothing(out):
    before = stamps(out)
    hub.write_cache(out, RANDOM)
    assert stamps(out) == before and not list(out.glob(".partial-*"))


@pytest.fixture
def tiny(monkeypatch) -> hub.SmallModel:
    """A model of one file, in the place of SD3.5."""

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
    def stop_half_way(folder: Path) -> None:
        tiny.write(folder)
        raise KeyboardInterrupt

    monkeypatch.setitem(hub.REGISTRY, "SD3.5", hub.SmallModel(tiny.repo, stop_half_way))
    with pytest.raises(KeyboardInterrupt):
        hub.write_cache(tmp_path, ["SD3.5"])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_unknown_name_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match=r"'FLUX\.3'.*FLUX.1-dev, FLUX.2-dev, SD3.5, Qwen-Image"):
        hub.write_cache(tmp_path / "new", ["SD3.5", "FLUX.3"])
    assert not (tmp_path / "new").exists()


def test_missing_trained_weights_are_named(tmp_path, monkeypatch):
    monkeypatch.setitem(hub.SHIPPED, "FLUX.1-dev", tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"FLUX\.1-dev.*nowhere"):
        hub.write_cache(tmp_path / "cache", ["FLUX.1-dev"])
