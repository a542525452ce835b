"""Writes the small models into a Hugging Face cache, from which xDiT loads them by the names of the real models.

    HF_HOME=OUT HF_HUB_OFFLINE=1 xdit --model FLUX.1-dev ...

loads the model that :func:`write_cache` wrote to OUT, without changes to xDiT or diffusers. Models that take an input
image can use OUT/input.png (--input_images).
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np

from small_models import slices

_HERE = Path(__file__).parent
SHIPPED = {
    "FLUX.1-dev": _HERE / "flux1_dev",
    "SD3.5": _HERE / "sd35_large",
    "Wan2.1-T2V": _HERE / "wan21_t2v",
}
"""Folders of the models with trained weights."""
SHARED_AUTOENCODERS = {"SD3.5": "FLUX.1-dev"}
"""By models whose folder has no autoencoder, the one of :data:`SHIPPED` that has it."""
# First line of the model card of every small model; distinguishes it from a real download.
MARK = "# A small stand-in, written by xfuser_cocodiff"
INPUT_IMAGE = "input.png"
"""Input image for models that take one, relative to the cache."""


@dataclass(frozen=True)
class SmallModel:
    """Small model in place of a repository of the hub."""

    repo: str
    write: Callable[[Path], None]
    """Writes the model to a folder in the format of diffusers."""
    takes_image: bool = False
    """Whether the model takes an input image."""
    makes_video: bool = False
    """Whether the model generates videos; diffusers saves them with a package that it does not install."""


def write_cache(out: Path, names: Sequence[str] | None = None) -> dict[str, Path]:
    """Write small models into a Hugging Face cache and return the snapshot folder of each.

    A snapshot is named by the hash of its content and written atomically; writing it again changes nothing. Other
    models in the cache are not changed. If a model takes an input image, :data:`INPUT_IMAGE` is written too.

    Args:
        out: folder to use as HF_HOME; created if missing.
        names: names in :data:`REGISTRY`; None for all of them.

    Raises:
        ValueError: a name is unknown.
        FileExistsError: the cache contains the real model of that name.
        FileNotFoundError: the trained weights are missing.
    """
    names = list(REGISTRY if names is None else names)
    if unknown := [name for name in names if name not in REGISTRY]:
        raise ValueError(f"unknown model {', '.join(map(repr, unknown))}; the small models are {', '.join(REGISTRY)}")
    written = {name: _write_model(Path(out), REGISTRY[name]) for name in names}
    if any(REGISTRY[name].takes_image for name in names):
        _write_input_image(Path(out) / INPUT_IMAGE)
    return written


def _write_model(out: Path, model: SmallModel) -> Path:
    folder = out / "hub" / f"models--{model.repo.replace('/', '--')}"
    _check_not_real(folder, model.repo)
    (folder / "snapshots").mkdir(parents=True, exist_ok=True)
    (folder / "refs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".partial-") as partial:
        draft, ref = Path(partial, "snapshot"), Path(partial, "main")
        model.write(draft)
        (draft / "README.md").write_text(
            f"{MARK}\n\nIt has the classes of {model.repo} in a small size, with weights of its own.\n"
        )
        commit = _digest(draft)
        snapshot = folder / "snapshots" / commit
        _publish(draft, snapshot)
        ref.write_text(commit)
        os.replace(ref, folder / "refs" / "main")
    return snapshot


def _check_not_real(folder: Path, repo: str) -> None:
    """Raise a FileExistsError if a folder of the cache contains the real model."""
    ref = folder / "refs" / "main"
    if not ref.exists():
        return
    card = folder / "snapshots" / ref.read_text().strip() / "README.md"
    if not (card.exists() and card.read_text(errors="replace").startswith(MARK)):
        raise FileExistsError(f"{folder} contains the real {repo}; choose another folder for the small models")


def _publish(draft: Path, snapshot: Path) -> None:
    """Move a finished draft to its snapshot folder, and replace a damaged snapshot of that name."""
    if snapshot.exists() and _digest(snapshot) != snapshot.name:
        shutil.rmtree(snapshot)
    try:
        os.rename(draft, snapshot)
    except OSError:  # it exists already, or another process was faster
        if not snapshot.exists():
            raise


def _digest(folder: Path) -> str:
    """Return the SHA-1 of the paths and contents of a folder: 40 hex digits, like commits of the hub."""
    digest = hashlib.sha1()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _copy_shipped(name: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        source, autoencoder = SHIPPED[name], SHIPPED[SHARED_AUTOENCODERS.get(name, name)] / "vae"
        for needed in (source / "model_index.json", autoencoder):
            if not needed.exists():
                raise FileNotFoundError(f"the trained weights of {name} are missing from this checkout: {needed}")
        shutil.copytree(source, folder)
        if name in SHARED_AUTOENCODERS:
            shutil.copytree(autoencoder, folder / "vae")

    return write


def _save_random(module: str, pipeline: str = "pipeline") -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        # Imported only when the model is requested, since it imports all of diffusers.
        getattr(import_module(f"small_models.{module}"), pipeline)().save_pretrained(folder)

    return write


def _write_input_image(file: Path) -> None:
    from PIL import Image

    gray = slices.draw("cells", 256, np.random.default_rng(0))
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".partial-") as partial:
        Image.fromarray((255 * gray).astype(np.uint8)).convert("RGB").save(draft := Path(partial, file.name))
        os.replace(draft, file)


REGISTRY = {
    "FLUX.1-dev": SmallModel("black-forest-labs/FLUX.1-dev", _copy_shipped("FLUX.1-dev")),
    "FLUX.2-dev": SmallModel("black-forest-labs/FLUX.2-dev", _save_random("flux2")),
    "SD3.5": SmallModel("stabilityai/stable-diffusion-3.5-large", _copy_shipped("SD3.5")),
    "Qwen-Image": SmallModel("Qwen/Qwen-Image", _save_random("qwen_image")),
    "FLUX.1-Kontext-dev": SmallModel(
        "black-forest-labs/FLUX.1-Kontext-dev", _save_random("flux1", "kontext"), takes_image=True
    ),
    "Qwen-Image-Edit": SmallModel("Qwen/Qwen-Image-Edit", _save_random("qwen_image", "edit"), takes_image=True),
    "FLUX.2-klein-4B": SmallModel("black-forest-labs/FLUX.2-klein-4B", _save_random("flux2", "klein")),
    "Lumina2": SmallModel("Alpha-VLLM/Lumina-Image-2.0", _save_random("lumina2")),
    "Wan2.1-T2V": SmallModel("Wan-AI/Wan2.1-T2V-14B-Diffusers", _copy_shipped("Wan2.1-T2V"), makes_video=True),
    "Wan2.2-T2V": SmallModel("Wan-AI/Wan2.2-T2V-A14B-Diffusers", _save_random("wan"), makes_video=True),
    "Hunyuanvideo-1.5": SmallModel(
        "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v", _save_random("hunyuan_video15"), makes_video=True
    ),
}
