"""The small models as a Hugging Face cache, so that xDiT loads them under the names of the real ones.

    HF_HOME=OUT HF_HUB_OFFLINE=1 xdit --model FLUX.1-dev ...

finds under OUT what :func:`write_cache` wrote there. Nothing in xDiT or diffusers is changed for it. Models that edit
have something to edit there: --input_images OUT/input.png.
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

from xfuser_cocodiff.lab.models import slices

_HERE = Path(__file__).parent
SHIPPED = {"FLUX.1-dev": _HERE / "flux1_dev", "Wan2.1-T2V": _HERE / "wan21_t2v"}
"""Models with trained weights, which are part of the installation."""
# Opens the model card of every snapshot that is ours, and tells it from a real download.
MARK = "# A small stand-in, written by xfuser_cocodiff"
INPUT_IMAGE = "input.png"
"""In the cache: what the models that edit may be given."""


@dataclass(frozen=True)
class SmallModel:
    """A repository of the hub, and what writes its small stand-in as a diffusers folder."""

    repo: str
    write: Callable[[Path], None]
    edits: bool = False
    """Whether it asks for an input image."""
    films: bool = False
    """Whether it makes videos, for which diffusers wants a package that it does not bring."""


def write_cache(out: Path, names: Sequence[str] | None = None) -> dict[str, Path]:
    """Write small models into a Hugging Face cache and return the snapshot folder of each.

    A snapshot is named after its content and appears complete or not at all; writing it again changes nothing. Other
    models in the cache are left alone. Where one of these edits, :data:`INPUT_IMAGE` comes beside them.

    Args:
        out: what HF_HOME is to be; created if missing.
        names: names from :data:`REGISTRY`, all of them if None.

    Raises:
        ValueError: a name is unknown.
        FileExistsError: the cache holds the real model of that name.
        FileNotFoundError: the trained weights are not part of this installation.
    """
    names = list(REGISTRY if names is None else names)
    if unknown := [name for name in names if name not in REGISTRY]:
        raise ValueError(f"unknown model {', '.join(map(repr, unknown))}; the small models are {', '.join(REGISTRY)}")
    written = {name: _write_model(Path(out), REGISTRY[name]) for name in names}
    if any(REGISTRY[name].edits for name in names):
        _draw_input(Path(out) / INPUT_IMAGE)
    return written


def _write_model(out: Path, model: SmallModel) -> Path:
    folder = out / "hub" / f"models--{model.repo.replace('/', '--')}"
    _refuse_real(folder, model.repo)
    (folder / "snapshots").mkdir(parents=True, exist_ok=True)
    (folder / "refs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".partial-") as partial:
        draft, ref = Path(partial, "snapshot"), Path(partial, "main")
        model.write(draft)
        (draft / "README.md").write_text(f"{MARK}\n\nIt has the classes of {model.repo} and none of its abilities.\n")
        commit = _digest(draft)
        snapshot = folder / "snapshots" / commit
        _publish(draft, snapshot)
        ref.write_text(commit)
        os.replace(ref, folder / "refs" / "main")
    return snapshot


def _refuse_real(folder: Path, repo: str) -> None:
    ref = folder / "refs" / "main"
    if not ref.exists():
        return
    card = folder / "snapshots" / ref.read_text().strip() / "README.md"
    if not (card.exists() and card.read_text(errors="replace").startswith(MARK)):
        raise FileExistsError(f"{folder} holds the real {repo}; write the small models to another folder")


def _publish(draft: Path, snapshot: Path) -> None:
    """Move a finished draft into place; a snapshot of that name that lost a file is replaced."""
    if snapshot.exists() and _digest(snapshot) != snapshot.name:
        shutil.rmtree(snapshot)
    try:
        os.rename(draft, snapshot)
    except OSError:  # It is there already, or another process was faster.
        if not snapshot.exists():
            raise


def _digest(folder: Path) -> str:
    """SHA-1 over the paths and contents of a folder: 40 hex digits, as the commits of the hub."""
    digest = hashlib.sha1()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _copy_shipped(name: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        if not (SHIPPED[name] / "model_index.json").exists():
            missing = f"the trained weights of {name} are missing from this installation: {SHIPPED[name]}"
            raise FileNotFoundError(missing)
        shutil.copytree(SHIPPED[name], folder)

    return write


def _save_random(module: str, pipeline: str = "pipeline") -> Callable[[Path], None]:
    def write(folder: Path) -> None:  # The import waits until the model is asked for: it pulls in all of diffusers.
        getattr(import_module(f"xfuser_cocodiff.lab.models.{module}"), pipeline)().save_pretrained(folder)

    return write


def _draw_input(file: Path) -> None:
    from PIL import Image

    grey = slices.draw("cells", 256, np.random.default_rng(0))
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".partial-") as partial:
        Image.fromarray((255 * grey).astype(np.uint8)).convert("RGB").save(draft := Path(partial, file.name))
        os.replace(draft, file)


REGISTRY = {
    "FLUX.1-dev": SmallModel("black-forest-labs/FLUX.1-dev", _copy_shipped("FLUX.1-dev")),
    "FLUX.2-dev": SmallModel("black-forest-labs/FLUX.2-dev", _save_random("flux2")),
    "SD3.5": SmallModel("stabilityai/stable-diffusion-3.5-large", _save_random("sd35")),
    "Qwen-Image": SmallModel("Qwen/Qwen-Image", _save_random("qwen_image")),
    "FLUX.1-Kontext-dev": SmallModel(
        "black-forest-labs/FLUX.1-Kontext-dev", _save_random("flux1", "kontext"), edits=True
    ),
    "Qwen-Image-Edit": SmallModel("Qwen/Qwen-Image-Edit", _save_random("qwen_image", "edit"), edits=True),
    "FLUX.2-klein-4B": SmallModel("black-forest-labs/FLUX.2-klein-4B", _save_random("flux2", "klein")),
    "Lumina2": SmallModel("Alpha-VLLM/Lumina-Image-2.0", _save_random("lumina2")),
    "Wan2.1-T2V": SmallModel("Wan-AI/Wan2.1-T2V-14B-Diffusers", _copy_shipped("Wan2.1-T2V"), films=True),
    "Wan2.2-T2V": SmallModel("Wan-AI/Wan2.2-T2V-A14B-Diffusers", _save_random("wan"), films=True),
    "Hunyuanvideo-1.5": SmallModel(
        "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v", _save_random("hunyuan_video15"), films=True
    ),
}
