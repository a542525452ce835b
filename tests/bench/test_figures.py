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
from xfuser_cocodiff.bench import figures, runs
from xfuser_cocodiff.bench.figures import FIGURES, Figure
from xfuser_cocodiff.bench.runs import Run
from xfuser_cocodiff.simulation import emulated

CHECKOUT = Path(__file__).parent.parent.parent
TWICE, FOURFOLD = "2.00 (2.00 to 2.00)", "4.00 (4.00 to 4.00)"
RUNS = list(dict.fromkeys(run for figure in FIGURES for run in figure.runs))


def model_record(asked: float, modes: str, ring: int = 1) -> dict[str, Any]:
    """As `cocodiff bench model` leaves it: stock takes 4 s, exact 2 s, and every other mode 1 s."""
    rows = []
    for mode in ("stock", *modes.split(",")):
        known = {"share_asked": asked, "share": asked + 0.001, "ring": ring, "mode": mode, "bound_seconds": 0.5}
        known |= {"scale": 0.1, "alone_seconds": 0.4, "compiled": False, "bytes_slow_fraction": 1.0}
        known |= {"schedules": {"a layer": "V first, 2 head groups"}}
        seconds = {"stock": 4.0, "exact": 2.0}.get(mode.split("/")[0], 1.0)
        rows.append({**known, "step_seconds": [seconds, 1.1 * seconds, 0.9 * seconds]})
    return {
        "rows": rows,
        "topology": "node=2,gpu=2,tile=2",
        "host": {"cores": 2},
        "shape": {"width": 512, "depth": 6, "tokens": 1024, "heads": 16},
        "rates": {"tile": 185.0, "gpu": 15.0, "node": 16.7},
    }


def a2a_record() -> dict[str, Any]:
    """As `cocodiff bench a2a` leaves it."""
    taken = {"stock": 0.1, "flat": 0.05, "auto": 0.025}
    rows = [
        {"bytes_per_rank": 4224, "algorithm": name, "seconds": [taken[name]] * 3, "plan": plan}
        for name, plan in (("stock", None), ("flat", "flat"), ("auto", "flat*"))
    ]
    return {"rows": rows}


def quality_record(model: str, steps: int, modes: str) -> dict[str, Any]:
    fidelity = {"psnr_db_mean": 47.94, "psnr_db_sd": 5.66, "ssim_mean": 0.99751}
    painted = {"block": {"psnr_db": 22.16, "psnr_db_stock": 22.12}} if steps == 50 else {}
    known = {"bytes_slow_fraction": 0.0836, **fidelity, "inpaint": painted}
    rows = [
        dict(zip(("mode", "codec"), mode.replace(";", ",").partition("@")[::2], strict=True)) | known
        for mode in modes.split(",")
    ]
    return {"command": f"cocodiff quality --model {model} --steps {steps} --json x", "rows": rows}


def compare_record(scale: str, modes: str) -> dict[str, Any]:
    """As `cocodiff compare` leaves it: stock's runs take 20 s, and those of modes 20, 15 and 10."""
    of_stock = {"name": "stock", "step_seconds_all": [[10.0, 10.0]] * 3}
    ours = [{"name": mode, "step_seconds_all": [[10.0, 10.0], [15.0], [10.0]]} for mode in modes.split(",")]
    return {"command": f"cocodiff compare --scale {scale} -- --model x", "runs": [of_stock, *ours]}


def plan_record(cluster: str, degree: int, mode: str) -> dict[str, Any]:
    """As `cocodiff plan` leaves it."""
    splits = [(4, 2, 0.1), (2, 4, 0.2), (4, 2, 0.3)]  # the last is another placement
    return {
        "machine": cluster,
        "degree": degree,
        "stock": {"ulysses": 8, "ring": 3, "step_seconds": 0.4},
        "splits": [{"ulysses": ulysses, "ring": ring, "mode": mode, "step_seconds": s} for ulysses, ring, s in splits],
        "modes": [{"mode": mode, "ulysses": 4, "ring": 2, "speedup": 4.0} for mode in ("exact", "balanced", "fast")],
    }


def kernels_record() -> dict[str, Any]:
    """As `cocodiff bench kernels` leaves it."""
    row = {"model": "flux.1-dev", "resolution": 1024, "kernel": "encode", "bytes": 5_000_000}
    calls = [
        {"mode": mode, "seconds": [1e-3 * number] * 3} for number, mode in enumerate(("exact", "balanced", "fast"), 1)
    ]
    return {"rows": [{**row, "bytes_per_second": [2e9] * 3, "ratio_to_copy": [0.5] * 3}], "host_calls": calls}


def record_of(run: Run) -> dict[str, Any]:
    given = dict(zip(run.command, run.command[1:], strict=False))
    match run.command[:2]:
        case "quality", _:
            modes = given.get("--mode", "balanced,fast,paper")
            return quality_record(given["--model"], int(given.get("--steps", 50)), modes)
        case "compare", _:
            return compare_record(given["--scale"], given["--modes"])
        case "plan", _:
            return plan_record(given["--cluster"], int(given["--degree"]), given["--mode"])
        case _, "a2a":
            return a2a_record()
        case _, "kernels":
            return kernels_record()
    return model_record(float(given["--share"].split(",")[0]), given["--mode"], int(given.get("--ring", 1)))


def leave(run: Run, folder: Path) -> None:
    """What it would, in little time."""
    run.record(folder).write_text(json.dumps(record_of(run)))
    if run.draws:
        run.picture(folder).write_bytes(b"a picture")


@pytest.mark.parametrize(
    ("name", "lines", "row"),
    [
        ("speed", 2 + 4, f"| 0.65 | {TWICE} of 8.00 | {FOURFOLD} of 8.00 | {FOURFOLD} of 8.00 | {FOURFOLD} |"),
        ("resolution", 2 + 1, f"| 0.65 | {TWICE} of 8.00 | {FOURFOLD} of 8.00 | {FOURFOLD} of 8.00 |"),
        ("equal", 2 + 1, f"| 0.20 | {TWICE} of 8.00 | {FOURFOLD} of 8.00 |"),
        ("ring", 2 + 3, f"| 4 x 2 | 0.50 | {TWICE} | {FOURFOLD} |"),
        ("compiled", 2 + 1, f"| 0.50 | 4.00 s (3.60 to 4.40) | {TWICE} | {FOURFOLD} |"),
        ("quality", 2 + 24, "| FLUX.1-dev | 50 | `balanced` | 0.084 | 47.9 ± 5.7 | 0.9975 | 22.16 (22.12) |"),
        ("first", 2 + 4, "| scale 1 | first | 20.0 s | 20.0 s, 1.00 | 20.0 s, 1.00 | 20.0 s, 1.00 |"),
        ("modes", 2 + 4, "| `exact` | 1 | equal | equal | 1 | equal | equal |"),
        ("worth", 2 + 4, "| together | 2.00 s (1.80 to 2.20) | 1.00 s (0.90 to 1.10) |"),
        ("small", 2 + 1, "| 4 KB | 100 ms (100 to 100) | 0.25 (0.25 to 0.25) by `flat*` | 0.50 (0.50 to 0.50) |"),
        ("kernels", 2 + 1, "| flux.1-dev, 1024 px | encode | 5.00 MB | 2.0 | 0.50 |"),
        (
            "host-calls",
            2 + 1,
            "| exchanges of a layer | 1.00 ms (1.00 to 1.00) | 2.00 ms (2.00 to 2.00) | 3.00 ms (3.00 to 3.00) |",
        ),
        ("ring-quality", 2 + 2, "| ring | 0.084, 47.9 dB | 0.084, 47.9 dB | 0.084, 47.9 dB | 0.084, 47.9 dB |"),
        ("rings-on-paper", 2 + 3, "| stock | 400.0 ms, 8 x 3 |  | 400.0 ms, 8 x 3 |  |"),
        ("ranks", 2 + 9, "| `aurora`, 12 tiles a node | 24 | 400.0 ms | 8 x 3 | 4 x 2 | 4.00 | 4.00 | 4.00 |"),
    ],
)
def test_records_become_the_tables_that_documents_have(tmp_path: Path, name: str, lines: int, row: str) -> None:
    [table] = figures.chosen(name)
    for run in table.runs:
        assert not table.is_there(tmp_path)
        leave(run, tmp_path)
    assert table.is_there(tmp_path)
    found = table.text(tmp_path)
    assert len(found.splitlines()) == lines and found.splitlines()[2] == row
    document, copy = (CHECKOUT / table.document).read_text(), tmp_path / table.document
    columns = found.splitlines()[0].split("|")[2:]  # the first may have a figure
    assert columns in [line.split("|")[2:] for line in document.splitlines()], "the table has other columns"
    copy.parent.mkdir(exist_ok=True)
    copy.write_text(document)
    table.put_into(tmp_path, tmp_path)
    assert f"-->\n\n{found}\n\n<!-- end of figure -->\n" in copy.read_text()
    kept = [line for line in document.splitlines() if not line.startswith("|")]
    assert [line for line in copy.read_text().splitlines() if not line.startswith("|")] == kept
    again = copy.read_text()
    table.put_into(tmp_path, tmp_path)
    assert copy.read_text() == again


def test_later_rows_are_of_what_they_say(tmp_path: Path) -> None:
    for figure in FIGURES:
        for run in figure.runs:
            leave(run, tmp_path)
    lines = {figure.name: figure.text(tmp_path).splitlines() for figure in FIGURES}
    assert lines["first"][3] == "| scale 1 | third | 20.0 s | 10.0 s, 2.00 | 10.0 s, 2.00 | 10.0 s, 2.00 |"
    assert lines["modes"][3] == "| `balanced` | 0.08 | 47.9 dB | 47.9 dB | 0.08 | 47.9 dB | 47.9 dB |"
    schedule = "V first, 2 head groups"
    assert lines["worth"][5] == (
        f"| what `auto` took | 2.00 s (1.80 to 2.20), {schedule} | 1.00 s (0.90 to 1.10), {schedule} |"
    )
    assert lines["worth"][4] == f"| {schedule} | 2.00 s (1.80 to 2.20) |  |"
    # Of two placements the faster one counts.
    assert lines["rings-on-paper"][3:] == [
        "| 2 x 4 | 200.0 ms | 200.0 ms | 200.0 ms | 200.0 ms |",
        "| 4 x 2 | **100.0 ms** | **100.0 ms** | **100.0 ms** | **100.0 ms** |",
    ]
    records = [json.loads(run.record(tmp_path).read_text()) for run in runs.SPEED[:1]]
    [cell] = [cell for cell in emulated.held_against(records[0]) if cell.mode == "exact"]
    assert lines["held"][2].split(" | ")[3] == f"2.00 s, {cell.ratio:.2f}"


def test_a_picture_is_copied_to_its_place(tmp_path: Path) -> None:
    [figure], checkout = figures.chosen("frontier"), tmp_path / "checkout"
    (checkout / "docs").mkdir(parents=True)
    [run] = figure.runs
    leave(run, tmp_path)
    run.picture(tmp_path).unlink()
    assert not figure.is_there(tmp_path), "it is not drawn yet"
    leave(run, tmp_path)
    figure.put_into(checkout, tmp_path)
    assert (checkout / "docs" / "frontier.png").read_bytes() == b"a picture"
    assert figure.text(tmp_path) == str(tmp_path / "frontier.png")


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
    monkeypatch.setattr(cli.bench, "_kernels", lambda options: seen.append(options) or 0)
    monkeypatch.setattr(cli.bench, "_a2a", lambda options: seen.append(options) or 0)
    for command in (cli.quality, cli.compare, cli.plan):
        monkeypatch.setattr(command, "run", lambda options: seen.append(options) or 0)
    arguments = run.arguments(tmp_path)
    assert arguments[:2] == [sys.executable, "-m"]
    assert cli.main(arguments[arguments.index("xfuser_cocodiff.cli") + 1 :]) == 0
    assert seen[0].json == tmp_path / f"{run.name}.json"
    assert not run.draws or seen[0].plot == tmp_path / f"{run.name}.png"
    assert not run.compared or seen[0].xdit_arguments == list(run.compared)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Two runs in the place of all, of which one fails as long as there is no file that it waits for."""
    code = (
        "import json, pathlib, sys; file = pathlib.Path(sys.argv[1]); print('at work');"
        "is_there = file.stem == 'first' or (file.parent / 'waited-for').exists();"
        "is_there and file.write_text(json.dumps({'rows': []})); sys.exit(not is_there)"
    )
    monkeypatch.setattr(Run, "arguments", lambda self, out: [sys.executable, "-c", code, str(self.record(out))])
    both = tuple(Run(name, ("bench",), 1.0, ("--preset", "flat")) for name in ("first", "second"))
    return [Figure("speed", "README.md", both, lambda records: [f"{len(records)} records"])]


def test_what_failed_is_said_and_made_the_next_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys) -> None:
    out, checkout = tmp_path / "out", tmp_path / "checkout"
    monkeypatch.setattr(figures, "FIGURES", stand_in(monkeypatch))
    checkout.mkdir()
    (checkout / "README.md").write_text("<!-- figure: speed -->\n\nold\n\n<!-- end of figure -->\n")
    command = ["bench", "all", "--out", str(out), "--into", str(checkout)]
    assert cli.main([*command, "--list"]) == 0
    to_do = "2 runs to do, about 2 minutes"
    assert capsys.readouterr().out == f"speed (README.md): {to_do}\nin all: {to_do}\n"
    assert cli.main(command) == 1
    said = capsys.readouterr().out
    assert f"second failed; see {out / 'second.log'}" in said and "first failed" not in said
    assert (out / "second.log").read_text() == "at work\n" and "old" in (checkout / "README.md").read_text()
    made = (out / "first.json").stat().st_mtime_ns
    (out / "waited-for").touch()
    assert cli.main(command) == 0
    assert (out / "first.json").stat().st_mtime_ns == made
    assert "2 records" in (checkout / "README.md").read_text()
    capsys.readouterr()
    assert cli.main([*command, "--list"]) == 0 and capsys.readouterr().out == "speed (README.md): done\nin all: done\n"


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
        "--only 'colour' is not known; valid are speed, first, modes, resolution, equal, worth, small, ring,"
        in capsys.readouterr().err
    )
