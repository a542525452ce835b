"""The commands of docs/launchers.md for two nodes, run on this machine with stand-ins for srun and mpiexec."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import ranks

TESTS = Path(__file__).parent.parent
PAGE = TESTS.parent / "docs/launchers.md"
SCRIPT = TESTS / "stock/flux_script.py"
MODEL = "--model black-forest-labs/FLUX.1-dev"
SMALL = (
    f"{MODEL} --prompt cat --height 64 --width 64 --num_inference_steps 2 --max_sequence_length 32 --seed 5 "
    "--coco_path latents.safetensors"
)
FLAG = " --use_cocodiff"


def commands(heading: str) -> str:
    """Return the commands under a heading of the page, changed to generate a small image."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    text = re.search(r"```bash\n(.*?)```", section, re.DOTALL)[1]
    for original, replacement in (("flux_example.py", str(SCRIPT)), (MODEL, SMALL), ("29500", str(ranks.free_port()))):
        assert original in text, original
        text = text.replace(original, replacement)
    return text


def start(text: str, folder: Path, stand_ins: str, **variables: str) -> subprocess.Popen:
    path = [TESTS / "stand_ins" / stand_ins, Path(sys.executable).parent, os.environ["PATH"]]
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    added = {"PATH": ":".join(map(str, path)), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", **variables}
    own_names = [name for name in {**inherited, **added} if name.startswith("COCODIFF_")]
    text = text.replace("-x MASTER_ADDR", " ".join(f"-x {name}" for name in ("MASTER_ADDR", *own_names)))
    return subprocess.Popen(
        ["bash", "-euc", text],
        cwd=folder,
        env={**inherited, **added},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(folder: Path, heading: str, stand_ins: str, by_flag: bool = True, **variables: str) -> torch.Tensor:
    """Run the commands under a heading, on both nodes if they are for one node each, and return the latents."""
    folder.mkdir()
    text = commands(heading)
    if not by_flag:
        text = text.replace(FLAG, "")
    nodes = [{"NODE": "0"}, {"NODE": "1"}] if "$NODE" in text else [{}]
    started = [start(text, folder, stand_ins, **node, **variables) for node in nodes]
    outputs = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(outputs)[-8000:]
    return load_file(folder / "latents.safetensors")["latents"]


@pytest.fixture(scope="module")
def stock(hub: Path, tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    """Return the latents of the same ranks without the plugin."""
    without = {"COCODIFF_DISABLE": "1", "PYTHONPATH": str(TESTS / "stock")}
    return run(tmp_path_factory.mktemp("stock") / "run", "torchrun", "", by_flag=False, **without)


@pytest.mark.slow  # test_launcher tests the variables of launchers
@pytest.mark.parametrize(
    ("heading", "stand_ins", "by_flag"),
    [("SLURM", "slurm", False), ("mpiexec", "open_mpi", True)],
    ids=["srun", "mpiexec"],
)
def test_two_nodes_are_detected(
    stock: torch.Tensor, tmp_path: Path, heading: str, stand_ins: str, by_flag: bool
) -> None:
    variables = {"COCODIFF_RECORD": "record", "COCODIFF_MODE": "exact", "SLURM_JOB_NODELIST": "node[0-1]"}
    if not by_flag:
        variables["COCODIFF_ENABLE"] = "1"
    assert torch.equal(run(tmp_path / "run", heading, stand_ins, by_flag, **variables), stock)
    records = [json.loads((tmp_path / f"run/record/rank{rank}.json").read_text()) for rank in range(4)]
    assert {(record["topology"], record["degree"]) for record in records} == {("node=2,gpu=2", 4)}
