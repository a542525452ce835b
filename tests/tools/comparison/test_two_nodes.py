"""A job that its user starts twice by torchrun, on two nodes without a shared folder, and `cocodiff compare`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ranks
from xfuser_cocodiff import cli

TESTS = Path(__file__).parents[2]
MODEL = "--model black-forest-labs/FLUX.1-dev"
SMALL = f"{MODEL} --prompt cat --height 64 --width 64 --num_inference_steps 2 --max_sequence_length 32 --seed 5"
FLAG = " --use_cocodiff"


def commands() -> str:
    """Return the commands for torchrun of docs/launchers.md, changed to generate a small image."""
    section = (TESTS.parent / "docs/launchers.md").read_text().split("\n## torchrun\n")[1]
    text = re.search(r"```bash\n(.*?)```", section, re.DOTALL)[1]
    script, port = TESTS / "stock/flux_script.py", str(ranks.free_port())
    for original, replacement in (("flux_example.py", f"{script} --coco_path l"), (MODEL, SMALL), ("29500", port)):
        assert original in text, original
        text = text.replace(original, replacement)
    return text


def start(text: str, folder: Path, **variables: str) -> subprocess.Popen:
    """Start commands in a shell, as on one node."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    added = {"PATH": path, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", **variables}
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(["bash", "-euc", text], cwd=folder, env={**os.environ, **added}, **piped)


def record(folder: Path, mode: str | None) -> Path:
    """Run the command of the page on both nodes, each with a folder of its own; return the folder that has both."""
    folder.mkdir()
    text = commands()
    assert FLAG in text and "$NODE" in text
    text = text if mode else text.replace(FLAG, "")
    variables = {"COCODIFF_MODE": mode} if mode else {}
    nodes = [
        start(text, folder, NODE=str(node), COCODIFF_RECORD=str(folder / f"node{node}"), **variables)
        for node in range(2)
    ]
    outputs = [process.communicate()[0] for process in nodes]
    assert [process.returncode for process in nodes] == [0, 0], "\n".join(outputs)[-8000:]
    return folder


@pytest.mark.slow  # test_compare compares records of a script
@pytest.mark.usefixtures("hub")
def test_records_of_two_nodes_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    stock, exact, balanced = (record(tmp_path / str(mode), mode) for mode in (None, "exact", "balanced"))
    assert len(list(stock.glob("node0/rank*.json"))) == len(list(stock.glob("node1/rank*.json"))) == 2
    out = tmp_path / "report"
    assert cli.main(["compare", str(stock), str(exact), str(balanced), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    found = json.loads((out / "report.json").read_text())["runs"]
    assert [run["name"] for run in found] == ["stock", "exact", "balanced"]
    assert found[1]["latents"]["bit_equal"] and not found[2]["latents"]["bit_equal"]
    assert found[2]["image"]["psnr_db"] > 20 and found[2]["mean_error"] > 0
    assert {run["topology"] for run in found[1:]} == {"node=2,gpu=2"}
    assert "sent between nodes" in printed and (out / "report.html").exists()
