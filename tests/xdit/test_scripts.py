"""Unmodified scripts and the xdit command, each in processes of its own: without the plugin, with it, with its flag."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image, ImageChops
from safetensors.torch import load_file

STOCK = Path(__file__).parent.parent / "stock"
ARGUMENTS = [
    *("--model", "black-forest-labs/FLUX.1-dev", "--prompt", "a photo of a cat", "--height", "128", "--width", "128"),
    *("--num_inference_steps", "2", "--max_sequence_length", "32", "--seed", "5", "--ulysses_degree", "2"),
]
WITHOUT_PLUGIN = {"COCODIFF_DISABLE": "1", "PYTHONPATH": str(STOCK)}
FLAGS = ["--use_cocodiff", "--cocodiff_topology", "2", "--cocodiff_a2a", "hierarchical", "--cocodiff_mode", "exact"]


def launch(command: list[str], folder: Path, **environment: str) -> str:
    folder.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def topology(folder: Path) -> str | None:
    """Topology of the mesh that a recorded launch used; None where it was stock."""
    return json.loads((folder / "record" / "rank0.json").read_text())["topology"]


@pytest.fixture(scope="module")
def torchrun() -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def test_example_script(hub: Path, tmp_path: Path, torchrun: list[str]) -> None:
    script = [*torchrun, str(STOCK / "flux_script.py"), *ARGUMENTS, "--coco_path", "latents.safetensors"]
    launch(script, tmp_path / "stock", **WITHOUT_PLUGIN)
    launch(script, tmp_path / "installed")
    launch([*script, *FLAGS], tmp_path / "flag", COCODIFF_RECORD="record")
    launch(script, tmp_path / "variable", COCODIFF_RECORD="record", COCODIFF_ENABLE="1", COCODIFF_TOPOLOGY="2x1")
    latents = {run.name: load_file(run / "latents.safetensors")["latents"] for run in tmp_path.iterdir()}
    assert set(latents) == {"stock", "installed", "flag", "variable"}
    for name, value in latents.items():
        assert torch.equal(value, latents["stock"]), name
    # And it was the plugin that ran there.
    assert topology(tmp_path / "flag") == "node=2"
    assert topology(tmp_path / "variable") == "node=2,gpu=1"


@pytest.mark.slow  # test_compare has the command with the flag and without
def test_xdit_command(hub: Path, tmp_path: Path) -> None:
    xdit = [sys.executable, "-m", "xfuser.cli", *ARGUMENTS]
    launch([*xdit, "--master_port=29611"], tmp_path / "stock", **WITHOUT_PLUGIN)
    launch([*xdit, "--master_port=29612"], tmp_path / "installed")
    dashed = [flag.replace("_", "-") for flag in FLAGS]
    launch([*xdit, "--master_port=29613", *dashed], tmp_path / "flag", COCODIFF_RECORD="record")
    assert topology(tmp_path / "flag") == "node=2"
    pictures = {run.name: Image.open(next(run.glob("*.png"))) for run in tmp_path.iterdir()}
    for name, picture in pictures.items():
        assert ImageChops.difference(picture, pictures["stock"]).getbbox() is None, name


@pytest.mark.slow  # test_flags has the errors of bad options on all ranks
def test_a_bad_option_ends_the_xdit_command(hub: Path, tmp_path: Path) -> None:
    xdit = [sys.executable, "-m", "xfuser.cli", "--master_port=29614", *ARGUMENTS]
    done = subprocess.run(
        [*xdit, "--use_cocodiff", "--cocodiff_topology", "3x2"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "--cocodiff_topology: topology '3x2' describes 3 x 2 = 6 ranks" in done.stderr
