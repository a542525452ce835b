"""Unmodified scripts and the xdit command in their own processes: without the plugin, with it, and with its flag."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from tests import ranks
from xfuser_cocodiff.engine.comm.stages import Stages

STOCK = Path(__file__).parent.parent / "stock"
ARGUMENTS = [
    *("--model", "black-forest-labs/FLUX.1-dev", "--prompt", "a photo of a cat", "--height", "64", "--width", "64"),
    *("--num_inference_steps", "2", "--max_sequence_length", "32", "--seed", "5", "--ulysses_degree", "2"),
]
FLAGS = ["--use_cocodiff", "--cocodiff_topology", "2", "--cocodiff_a2a", "hierarchical", "--cocodiff_mode", "exact"]


def run_forked(rank: int, port: int, folder: Path, arguments: list[str]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port))
    torch.set_num_threads(1)
    os.chdir(folder)
    sys.argv = ["flux_script.py", *arguments]
    with mock.patch.object(Stages, "start", autospec=True, side_effect=Stages.start) as start:
        runpy.run_path(str(STOCK / "flux_script.py"), run_name="__main__")
    Path("exchanges").write_text(str(start.call_count))


def test_script_with_the_flag_equals_stock(hub: Path, tmp_path: Path) -> None:
    latents, exchanges = [], []
    for name, flags in (("without", []), ("with", FLAGS)):
        folder, port = tmp_path / name, ranks.free_port()
        folder.mkdir()
        arguments = [*ARGUMENTS, "--coco_path", "latents.safetensors", *flags]
        both = [ranks.context.Process(target=run_forked, args=(rank, port, folder, arguments)) for rank in range(2)]
        for process in both:
            process.start()
        for process in both:
            process.join()
        assert [process.exitcode for process in both] == [0, 0]
        latents.append(load_file(folder / "latents.safetensors")["latents"])
        exchanges.append(int((folder / "exchanges").read_text()))
    assert torch.equal(*latents)
    assert exchanges[0] == 0 < exchanges[1]


@pytest.mark.slow  # test_pipelines has xDiT's runner in this process, test_config_fields its flags
def test_xdit_command_takes_the_flag(hub: Path, tmp_path: Path) -> None:
    dashed = [flag.replace("_", "-") for flag in FLAGS]
    done = subprocess.run(
        [sys.executable, "-m", "xfuser.cli", *ARGUMENTS, f"--master_port={ranks.free_port()}", *dashed],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COCODIFF_RECORD": "record"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert list(tmp_path.glob("*.png"))
    assert json.loads((tmp_path / "record" / "rank0.json").read_text())["topology"] == "node=2"
