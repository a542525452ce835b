"""Unmodified example scripts of xDiT with small models: the plugin communicates, and results equal stock.

The scripts are not in xDiT's package. XDIT_EXAMPLES lists folders of them, separated as in PATH: that of the main
branch, then that of version 0.4.4 for scripts that were removed.
"""

import functools
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

from tests import ranks

FOLDERS = [Path(folder) for folder in os.environ.get("XDIT_EXAMPLES", "").split(os.pathsep) if folder]
STOCK = Path(__file__).parent.parent / "stock"
pytestmark = [
    pytest.mark.slow,  # test_pipelines, test_more_pipelines and test_transformers have the models
    pytest.mark.skipif(not FOLDERS, reason="XDIT_EXAMPLES names no folder of xDiT's examples"),
]
SIZE = "--height 128 --width 128 --num_inference_steps 3 --seed 5 --prompt cat"
FLAGS = "--use_cocodiff --cocodiff_mode exact --cocodiff_a2a hierarchical --cocodiff_topology 2x2 --cocodiff_v_first on"


@dataclass(frozen=True)
class Example:
    """Example script and its arguments."""

    script: str
    model: str
    """Function that makes the small model, with its module."""
    more: str = ""
    parallel: str = "--ulysses_degree 4"
    flags: str = FLAGS
    topology: str | None = "node=2,gpu=2"
    """Topology along which the plugin communicates; None if it does not."""

    @property
    def ranks(self) -> int:
        return 4 if self.topology else 2


OURS, SMALL = "tests.example_models", "models"
UNBINNED = "--no_use_resolution_binning"
EXAMPLES = {
    "CogVideoX": Example("cogvideox_example.py", f"{OURS}:cogvideox", "--num_frames 9"),
    "CogVideoX, USP": Example("cogvideox_usp_example.py", f"{OURS}:cogvideox", "--num_frames 9"),
    "FLUX.1": Example("flux_example.py", f"{SMALL}.flux1:pipeline"),
    "FLUX.1 control": Example("flux_control_example.py", f"{OURS}:flux_control", "--max_sequence_length 32"),
    "FLUX.2": Example("flux2_example.py", f"{SMALL}.flux2:pipeline", "--max_sequence_length 48"),
    "FLUX.2 klein": Example("flux2_example.py", f"{SMALL}.flux2:klein", "--max_sequence_length 48"),
    "HunyuanDiT": Example("hunyuandit_example.py", f"{OURS}:hunyuandit", UNBINNED),
    "PixArt-Alpha": Example("pixartalpha_example.py", f"{OURS}:pixart_alpha", UNBINNED),
    "PixArt-Sigma": Example("pixartsigma_example.py", f"{OURS}:pixart_sigma", UNBINNED),
    "Sana": Example("sana_example.py", f"{OURS}:sana"),
    "Sana-Sprint": Example("sana_sprint_example.py", f"{OURS}:sana_sprint", "--num_inference_steps 2"),
    "Stable Diffusion 3": Example("sd3_example.py", f"{OURS}:stable_diffusion_3"),
    "Stable Diffusion XL": Example(
        "sdxl_example.py",
        f"{OURS}:sdxl",
        parallel="--use_cfg_parallel",
        flags="--use_cocodiff --cocodiff_mode exact",
        topology=None,
    ),
}


def find(script: str) -> Path:
    """Return the script from the first folder that has it."""
    found = [folder / script for folder in FOLDERS if (folder / script).exists()]
    if not found:
        pytest.skip(f"no folder of XDIT_EXAMPLES has {script}")
    return found[0].absolute()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a small pipeline, which two scripts may share."""

    @functools.cache
    def write(model: str) -> Path:
        module, _, make = model.partition(":")
        folder = tmp_path_factory.mktemp("model")
        getattr(importlib.import_module(module), make)().save_pretrained(folder)
        return folder

    return write


def launch(example: Example, model: Path, folder: Path, flags: str = "", **variables: str) -> dict[str, bytes]:
    """Run an example in a folder, and return its pictures or its video by file name."""
    inputs, results = folder / "test_imgs", folder / "results"
    inputs.mkdir(parents=True)
    Image.radial_gradient("L").save(inputs / "016#.png")  # control image of FLUX.1 control
    results.mkdir()  # some scripts expect it
    torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={example.ranks}"]
    done = subprocess.run(
        [
            *(*torchrun, f"--master_port={ranks.free_port()}", str(find(example.script)), "--model", str(model)),
            *f"{SIZE} {example.parallel} {example.more} {flags}".split(),
        ],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return {file.name: file.read_bytes() for file in results.iterdir()}


def check_record(example: Example, folder: Path) -> None:
    """Check that the plugin communicated along all axes, that V can go first, and that the picture is not uniform."""
    axes = set(example.topology.replace("=2", "").split(",")) if example.topology else set()
    for rank in range(example.ranks):
        record = json.loads((folder / f"rank{rank}.json").read_text())
        assert record["topology"] == example.topology
        steps = [step for run in record["runs"] for step in run["steps"]]
        assert steps and all({axis for axis, sent in step["sent_bytes"].items() if sent} == axes for step in steps)
        layers = [status for statuses in record["layers"].values() for status in statuses]
        assert bool(layers) == bool(axes)
        assert all(status.startswith("V can go first, from ") for status in layers), layers
    picture = Image.open(next(folder.glob("image*.png"))).convert("RGB")
    assert all(darkest < brightest for darkest, brightest in picture.getextrema())


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_equals_stock(name: str, models: Callable[[str], Path], tmp_path: Path) -> None:
    example = EXAMPLES[name]
    find(example.script)
    model = models(example.model)
    stock = launch(example, model, tmp_path / "stock", COCODIFF_DISABLE="1", PYTHONPATH=str(STOCK))
    assert stock
    record = tmp_path / "record"
    assert launch(example, model, tmp_path / "plugin", example.flags, COCODIFF_RECORD=str(record)) == stock
    check_record(example, record)
