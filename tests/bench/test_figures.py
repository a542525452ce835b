"""Tables of the documents, from records that stand in for those of long runs."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from xfuser_cocodiff import cli
from xfuser_cocodiff.bench import figures
from xfuser_cocodiff.bench.figures import TABLES, Run, Table

CHECKOUT = Path(__file__).parent.parent.parent
TWICE, FOURFOLD = "2.00 (2.00 to 2.00)", "4.00 (4.00 to 4.00)"
RUNS = [run for table in TABLES for run in table.runs]


def model_record(asked: float, modes: str, ring: int = 1) -> dict[str, Any]:
    """As `cocodiff bench model` leaves it: stock takes 4 s, exact 2 s, and every other mode 1 s."""
    rows = []
    for mode in ("stock", *modes.split(",")):
        known = {"share_asked": asked, "share": asked + 0.001, "ring": ring, "mode": mode, "bound_seconds": 0.5}
        seconds = {"stock": 4.0, "exact": 2.0}.get(mode, 1.0)
        rows.append({**known, "step_seconds": [seconds, 1.1 * seconds, 0.9 * seconds]})
    return {"rows": rows}


def quality_record(model: str, steps: int) -> dict[str, Any]:
    fidelity = {"psnr_db_mean": 47.94, "psnr_db_sd": 5.66, "ssim_mean": 0.99751}
    painted = {"block": {"psnr_db": 22.16, "psnr_db_stock": 22.12}} if steps == 50 else {}
    row = {"mode": "fast", "bytes_slow_fraction": 0.0836, **fidelity, "inpaint": painted}
    return {"command": f"cocodiff quality --model {model} --steps {steps} --json x", "rows": [row]}


def record_of(run: Run) -> dict[str, Any]:
    given = dict(zip(run.command, run.command[1:], strict=False))
    if run.command[0] == "quality":
        return quality_record(given["--model"], int(given["--steps"]))
    return model_record(float(given["--share"].split(",")[0]), given["--mode"], int(given.get("--ring", 1)))


@pytest.mark.parametrize(
    ("name", "lines", "row"),
    [
        ("speed", 2 + 4, f"| 0.65 | {TWICE} of 8.00 | {FOURFOLD} of 8.00 | {FOURFOLD} of 8.00 | {FOURFOLD} |"),
        ("resolution", 2 + 1, f"| 0.65 | {TWICE} of 8.00 | {FOURFOLD} of 8.00 | {FOURFOLD} of 8.00 |"),
        ("equal", 2 + 1, f"| 0.20 | {TWICE} of 8.00 | {FOURFOLD} of 8.00 |"),
        ("ring", 2 + 3, f"| 4 x 2 | 0.50 | {TWICE} | {FOURFOLD} |"),
        ("compiled", 2 + 1, f"| 0.50 | 4.00 s (3.60 to 4.40) | {TWICE} | {FOURFOLD} |"),
        ("quality", 2 + 8, "| FLUX.1-dev | 50 | `fast` | 0.084 | 47.9 ± 5.7 | 0.9975 | 22.16 (22.12) |"),
    ],
)
def test_records_become_the_tables_that_documents_have(tmp_path: Path, name: str, lines: int, row: str) -> None:
    [table] = figures.chosen(name)
    for run in table.runs:
        assert figures.markdown(table, tmp_path) is None
        run.record(tmp_path).write_text(json.dumps(record_of(run)))
    found = figures.markdown(table, tmp_path)
    assert len(found.splitlines()) == lines and found.splitlines()[2] == row
    document, copy = (CHECKOUT / table.document).read_text(), tmp_path / "document.md"
    assert found.splitlines()[0] in document, "the table has other columns"
    copy.write_text(document)
    figures.put_into(copy, name, found)
    assert f"-->\n\n{found}\n\n<!-- end of figure -->\n" in copy.read_text()
    kept = [line for line in document.splitlines() if not line.startswith("|")]
    assert [line for line in copy.read_text().splitlines() if not line.startswith("|")] == kept
    again = copy.read_text()
    figures.put_into(copy, name, found)
    assert copy.read_text() == again


def test_a_document_without_a_place_for_a_figure_is_left_alone(tmp_path: Path) -> None:
    document = tmp_path / "document.md"
    place = "<!-- figure: other -->\n\nold\n\n<!-- end of figure -->\n"
    for text, words in ((place, "0 places for the figure 'speed'"), (2 * place.replace("other", "speed"), "2 places")):
        document.write_text(text)
        with pytest.raises(ValueError, match=words):
            figures.put_into(document, "speed", "new")
        assert document.read_text() == text


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_commands_are_such_as_there_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Run) -> None:
    seen = []
    monkeypatch.setattr(cli.bench, "_model", lambda options: seen.append(options) or 0)
    monkeypatch.setattr(cli.quality, "run", lambda options: seen.append(options) or 0)
    arguments = run.arguments(tmp_path)
    assert arguments[:2] == [sys.executable, "-m"]
    assert cli.main(arguments[arguments.index("xfuser_cocodiff.cli") + 1 :]) == 0
    assert seen[0].json == tmp_path / f"{run.name}.json"


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[Table]:
    """Two runs in the place of all, of which one fails as long as there is no file that it waits for."""
    code = (
        "import json, pathlib, sys; file = pathlib.Path(sys.argv[1]); print('at work');"
        "is_there = file.stem == 'first' or (file.parent / 'waited-for').exists();"
        "is_there and file.write_text(json.dumps({'rows': []})); sys.exit(not is_there)"
    )
    monkeypatch.setattr(Run, "arguments", lambda self, out: [sys.executable, "-c", code, str(self.record(out))])
    runs = tuple(Run(name, ("bench",), 1.0, ("--preset", "flat")) for name in ("first", "second"))
    return [Table("speed", "README.md", runs, lambda records: [f"{len(records)} records"])]


def test_what_failed_is_said_and_made_the_next_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    out, checkout = tmp_path / "out", tmp_path / "checkout"
    monkeypatch.setattr(figures, "TABLES", stand_in(monkeypatch))
    checkout.mkdir()
    (checkout / "README.md").write_text("<!-- figure: speed -->\n\nold\n\n<!-- end of figure -->\n")
    command = ["bench", "all", "--out", str(out), "--into", str(checkout)]
    assert cli.main([*command, "--list"]) == 0
    assert "speed (README.md): 2 of 2 runs to do, about 2 minutes" in capsys.readouterr().out
    assert cli.main(command) == 1
    said = capsys.readouterr().out
    assert f"second failed; see {out / 'second.log'}" in said and "first failed" not in said
    assert (out / "second.log").read_text() == "at work\n" and "old" in (checkout / "README.md").read_text()
    made = (out / "first.json").stat().st_mtime_ns
    (out / "waited-for").touch()
    assert cli.main(command) == 0
    assert (out / "first.json").stat().st_mtime_ns == made
    assert "2 records" in (checkout / "README.md").read_text()
    assert cli.main([*command, "--list"]) == 0 and "speed (README.md): done" in capsys.readouterr().out


def test_a_run_ends_with_the_command_that_asked_for_it(tmp_path: Path) -> None:
    """Else an emulated cluster would go on without anybody who waits for it."""
    inner = "import sys, time, pathlib; pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
    outer = (
        "import sys; from pathlib import Path; from xfuser_cocodiff.bench import figures;"
        f"figures._status([sys.executable, '-c', {inner!r}, sys.argv[1]], {{}}, Path(sys.argv[1] + '.log'))"
    )
    process = subprocess.Popen([sys.executable, "-c", outer, str(tmp_path / "began")])
    while not (tmp_path / "began").exists():
        assert process.poll() is None
        time.sleep(0.05)
    [child] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.terminate()
    assert process.wait() == 128 + signal.SIGTERM
    assert not Path(f"/proc/{child}").exists()


def test_unknown_tables_are_refused(tmp_path: Path, capsys) -> None:
    assert cli.main(["bench", "all", "--out", str(tmp_path), "--only", "speed,colour"]) == 2
    assert (
        "--only 'colour' is not known; valid are speed, resolution, equal, ring, compiled, quality"
        in capsys.readouterr().err
    )
