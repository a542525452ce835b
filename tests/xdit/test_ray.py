"""xDiT's Ray pipeline on a private Ray cluster with the plugin's flags; test_http_service has its variables."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image, ImageChops

STOCK = Path(__file__).parent.parent / "stock"
ARGUMENTS = [
    *("--model", "black-forest-labs/FLUX.1-dev", "--prompt", "a photo of a cat", "--height", "64", "--width", "64"),
    *("--num_inference_steps", "3", "--max_sequence_length", "32", "--seed", "5", "--ulysses_degree", "2"),
    *("--use_ray", "--ray_world_size", "2", "--coco_path", "picture.png"),
]
FLAGS = ["--use_cocodiff", "--cocodiff_topology", "2x1", "--cocodiff_a2a", "hierarchical", "--cocodiff_mode", "exact"]
STOCK_VARIABLES = {
    "COCODIFF_DISABLE": "1",
    "PYTHONPATH": str(STOCK),
    "RAY_OVERRIDE_RESOURCES": '{"GPU": 2}',  # without the plugin Ray finds no GPUs
}


@pytest.fixture
def ray_folder() -> Iterator[str]:
    """Return a folder for Ray's sockets, with a short path; a private one, so that no other cluster is joined."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        yield folder


def launch(folder: Path, ray_folder: str, flags: list[str], **variables: str) -> Image.Image:
    """Run the script and return its picture."""
    folder.mkdir()
    # Ray takes an empty CUDA_VISIBLE_DEVICES, which scripts/test.sh sets, for no GPU.
    left_out = ("RANK", "RAY_ADDRESS", "CUDA_VISIBLE_DEVICES")
    inherited = {name: value for name, value in os.environ.items() if name not in left_out}
    environment = {**inherited, "OMP_NUM_THREADS": "1", "RAY_TMPDIR": ray_folder, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, str(STOCK / "ray_flux_script.py"), *ARGUMENTS, *flags],
        cwd=folder,
        env={**environment, **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return Image.open(folder / "picture.png")


@pytest.mark.slow  # it starts a Ray cluster twice
@pytest.mark.alone  # Ray fails if its own processes take more than seconds to start
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed (pip install '.[serve]')")
def test_ray_workers_use_the_plugin_and_equal_stock(hub: Path, tmp_path: Path, ray_folder: str) -> None:
    stock = launch(tmp_path / "stock", ray_folder, [], **STOCK_VARIABLES)
    record = tmp_path / "record"
    picture = launch(tmp_path / "flags", ray_folder, FLAGS, COCODIFF_RECORD=str(record))
    assert ImageChops.difference(picture, stock).getbbox() is None
    for rank in range(2):
        found = json.loads((record / f"rank{rank}.json").read_text())
        assert (found["rank"], found["degree"], found["topology"]) == (rank, 2, "node=2,gpu=1")
