"""A job that its user starts twice by torchrun, on two nodes without a shared folder, and `cocodiff compare`."""

import json
from pathlib import Path

import pytest

from tests.scripts.test_entry_points import FLAG, commands, start
from xfuser_cocodiff import cli


def record(folder: Path, mode: str | None) -> Path:
    """Run the command of the page on both nodes, each with a folder of its own; return the folder that has both."""
    folder.mkdir()
    text = commands("torchrun")
    assert FLAG in text and "$NODE" in text
    text = text if mode else text.replace(FLAG, "")
    variables = {"COCODIFF_MODE": mode} if mode else {}
    nodes = [
        start(text, folder, "", NODE=str(node), COCODIFF_RECORD=str(folder / f"node{node}"), **variables)
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
