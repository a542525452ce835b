"""What `cocodiff compare` makes of records: figures from synthetic ones, and the reports that tell them."""

import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image
from safetensors.torch import save_file

from xfuser_cocodiff.lab.comparison import charts, fidelity, record, report
from xfuser_cocodiff.lab.comparison.figures import Outcome, figures
from xfuser_cocodiff.lab.reporting import host


def step(seconds: float, **axes: float) -> dict:
    """A step as the recorder writes it: axes in seconds, at 1 kB for each millisecond.

    Exchanges are in flight for half as long again as their collectives take, and a third of that is hidden.
    """
    total = sum(axes.values())
    return {
        "seconds": seconds,
        "a2a_seconds": axes,
        "sent_bytes": {axis: s * 1e6 for axis, s in axes.items()},
        "in_flight_seconds": 1.5 * total,
        "hidden_seconds": 0.5 * total,
    }


def run(*steps: dict, digest: str = "same", memory: int = 1000) -> dict:
    """A run as the recorder writes it."""
    figures = {"peak_memory_bytes": memory, "latents_sha256": digest, "codecs": None}
    return {"total_steps": len(steps), "steps": steps, **figures}


def leave(folder: Path, *ranks: list[dict], latents: torch.Tensor | None = None, shade: int | None = None) -> Path:
    """Write what the recorder would leave: the runs of each rank, rank 0's latents and the last rank's picture."""
    folder.mkdir(parents=True)
    for rank, runs in enumerate(ranks):
        engine = {"rank": rank, "degree": len(ranks), "topology": "gpu=2", "device": "CPU, threads per rank: 1"}
        (folder / f"rank{rank}.json").write_text(json.dumps({**engine, "runs": runs}))
    if latents is not None:
        save_file({"latents": latents}, folder / "latents.safetensors")
    if shade is not None:
        Image.new("RGB", (32, 24), (shade, 90, 90)).save(folder / f"picture{len(ranks) - 1}.png")
    return folder


def a_record(tmp_path: Path, **other: object) -> dict:
    """A whole record of two ranks and two repeats; `other` changes the last run of the plugin's rank 1."""
    fast, slow = step(0.1, flat=0.04), step(0.2, flat=0.06)
    mine = run(slow, fast, fast)
    sides = {
        "stock": [[mine, mine, mine]] * 2,
        "exact": [[mine, mine, mine], [mine, mine, {**mine, **other}]],
    }
    outcomes = {}
    for name, ranks in sides.items():
        different = float(bool(other) and name == "exact")
        latents = torch.arange(33, dtype=torch.bfloat16) / 8 + different
        leave(tmp_path / "records" / name, *ranks, latents=latents, shade=100 + int(different) * 3)
        outcomes[name] = Outcome.read([tmp_path / "records" / name], 2)
    runs = [
        {"name": name, "model": "M<1>", "degree": 2, "command": f"xdit {name}", "trace": f"trace-{name}.json.gz"}
        | figures(outcome, outcomes["stock"], tmp_path)
        for name, outcome in outcomes.items()
    ]
    return {**host.header(), "command": "cocodiff", "repeats": 2, "launches": "one", "runs": runs}


def test_a_step_takes_as_long_as_its_slowest_rank_and_the_first_one_does_not_count() -> None:
    repeat = [run(step(9.0), step(1.0), step(4.0), step(2.0)), run(step(1.0), step(3.0), step(2.0), step(2.5))]
    assert record.step_seconds(repeat) == 3.0
    assert record.step_seconds([run(step(9.0))]) == 9.0


def test_traffic_is_a_mean_over_ranks_and_every_axis_is_kept() -> None:
    first = [run(step(1, gpu=0.9, tile=0.9), step(1, gpu=0.2, tile=0.1)), run(step(1, gpu=0.9), step(1, gpu=0.4))]
    second = [run(step(1, gpu=0.9), step(1, gpu=0.6))] * 2
    assert record.a2a_seconds([first, second]) == pytest.approx({"gpu": 0.45, "tile": 0.025})
    assert record.sent_bytes([[run(step(1, gpu=0.002), step(1, gpu=0.004))] * 2]) == {"gpu": 3000}


def test_warm_up_is_dropped_and_missing_runs_are_an_error(tmp_path: Path) -> None:
    runs = [run(step(float(number))) for number in range(3)]
    ranks = record.read_ranks(leave(tmp_path / "a", runs, runs))
    assert [record.step_seconds(repeat) for repeat in record.last_repeats(ranks, 2)] == [1.0, 2.0]
    with pytest.raises(record.RecordError, match="expected 4 runs of the pipeline, recorded 3"):
        record.last_repeats(ranks, 4)
    with pytest.raises(record.RecordError, match="no rank recorded"):
        record.read_ranks(tmp_path / "nothing")
    with pytest.raises(record.RecordError, match="do not belong together"):
        record.read_ranks(leave(tmp_path / "b", runs, runs[:1]))


def test_a_record_says_what_it_must(tmp_path: Path) -> None:
    stock, exact = a_record(tmp_path)["runs"]
    required = ["name", "model", "degree", "topology", "step_seconds", "a2a_seconds", "hidden_seconds", "bytes"]
    assert {*required, "peak_memory_bytes", "latents", "image"} <= stock.keys() == exact.keys()
    assert exact["step_seconds"] == [0.1, 0.1]
    assert exact["ratio_to_stock"] == 1
    assert exact["a2a_seconds"] == pytest.approx(0.06)
    assert exact["hidden_seconds"] == pytest.approx(0.02)
    assert exact["bytes"] == {"flat": 46667}
    assert exact["latents"] | {"differs_at": []} == exact["latents"]
    assert exact["latents"]["bit_equal"]
    assert exact["latents"]["max_abs"] == 0
    assert exact["latents"]["psnr_db"] is None
    assert exact["image"] == {"psnr_db": None, "ssim": 1.0, "path": "records/exact/picture1.png"}


def test_chart_and_table_have_the_same_communication(tmp_path: Path) -> None:
    """Also where the first steps, in which schedules are tried, hid something else, and ranks and repeats differ."""
    trial = {**step(0.3, node=0.08, gpu=0.02), "in_flight_seconds": 0.2, "hidden_seconds": 0.18}
    steps = [
        {**step(0.2, node=0.05 + n / 100, gpu=0.01), "in_flight_seconds": 0.06 + n / 90, "hidden_seconds": n / 100}
        for n in range(4)
    ]
    runs = [run(trial, *steps), run(trial, *steps[1:], steps[0]), run(trial, *steps[:3])]
    side = Outcome.read([leave(tmp_path / "exact", runs[:2], runs[1::-1])], 2)
    one = {"name": "exact", **figures(side, side, tmp_path)}
    axes = Figure().subplots()
    charts._draw_bar(axes, 0, one)
    node, gpu, rest = (bar.get_width() / 1000 for bar in axes.patches)
    assert 0 < one["hidden_seconds"] < one["a2a_seconds"]
    assert sum(one["a2a_seconds_by_axis"].values()) == pytest.approx(one["a2a_seconds"])
    assert node + gpu == pytest.approx(one["a2a_seconds"] - one["hidden_seconds"])
    assert node + gpu + rest == pytest.approx(one["step_seconds_spread"]["median"])


def test_on_an_accelerator_nobody_says_what_was_hidden(tmp_path: Path) -> None:
    unseen = [[run({**step(0.1, flat=0.04), "in_flight_seconds": None, "hidden_seconds": None})]] * 2
    side = Outcome.read([leave(tmp_path / "exact", *unseen)], 1)
    found = figures(side, side, tmp_path)
    assert (found["a2a_seconds"], found["hidden_seconds"]) == (pytest.approx(0.04), None)


def test_one_other_digest_on_one_rank_in_one_repeat_is_not_bit_equal(tmp_path: Path) -> None:
    figures = a_record(tmp_path, latents_sha256="other")
    exact = figures["runs"][1]
    assert exact["latents"]["bit_equal"] is False
    assert exact["latents"]["differs_at"] == [{"repeat": 1, "rank": 1}]
    assert exact["latents"]["max_abs"] == 1
    assert exact["latents"]["psnr_db"] == pytest.approx(20 * np.log10(4))
    assert exact["image"]["psnr_db"] == pytest.approx(10 * np.log10(255**2 / 3))
    assert exact["image"]["ssim"] < 1
    assert not report.passed(figures)
    title, text = report.verdict(figures)
    assert title == "Not the same result"
    assert "1 of 2 runs, on 1 rank;" in text
    assert "report this as a bug" in text


def test_who_is_to_blame_for_another_result(tmp_path: Path) -> None:
    figures = a_record(tmp_path, latents_sha256="other")
    figures["runs"][1]["name"] = "fast"
    assert not report.passed(figures)  # nothing was approximated
    assert "Nothing was approximated" in report.verdict(figures)[1]
    figures["runs"][1]["codecs"] = {"bytes_slow_fraction": 0.1}
    assert report.passed(figures)
    assert "approximation" in report.verdict(figures)[1]
    figures["runs"][0]["latents"]["repeatable"] = False
    assert "fix the seed" in report.verdict(figures)[1]


ENCODED = {"sent_bytes": 20, "exact_bytes": 100, "repeated": 1, "reference_bytes": 5000}
"""What the recorder writes of codecs in a step, as far as a comparison goes by it."""


def test_codecs_are_told_of(tmp_path: Path) -> None:
    stock = [[run(step(0.1), step(0.1))]] * 2
    fast = [[{**run(step(0.1), step(0.1)), "codecs": [ENCODED] * 2}]] * 2
    sides = [Outcome.read([leave(tmp_path / name, *side)], 1) for name, side in (("stock", stock), ("fast", fast))]
    named = [
        {"name": name, "model": None, "degree": 2, "command": "x", "trace": None, **figures(side, sides[0], tmp_path)}
        for name, side in zip(("stock", "fast"), sides, strict=True)
    ]
    assert named[0]["codecs"] is None
    assert named[1]["codecs"] == {
        "bytes_slow_fraction": 0.2,
        "repeated": 4,
        "reference_bytes": 5000,
    }
    whole = {**host.header(), "command": "cocodiff", "repeats": 1, "launches": "one", "runs": named}
    html = report.write(whole, tmp_path).read_text()
    for words in ("20.0 %", "5.00 kB", "4 exchanges had values"):
        assert words in html


def test_what_was_coded_or_why_not(tmp_path: Path) -> None:
    def found(name: str, codecs: list | None, **more: object) -> dict:
        ranks = [[{**run(step(0.1)), "codecs": codecs, **more}]] * 2
        side = Outcome.read([leave(tmp_path / name, *ranks)], 1)
        return figures(side, side, tmp_path)

    fast = found("fast", [ENCODED])
    assert (fast["coded_fraction"], fast["coded_reason"]) == (0.2, None)
    exact = found("exact", None, coded_reason="mode exact")
    assert (exact["coded_fraction"], exact["coded_reason"]) == (None, "mode exact")
    nothing = {**ENCODED, "sent_bytes": 0, "exact_bytes": 0}
    compiled = found("compiled", [nothing], coded_reason="the transformer is compiled")
    assert (compiled["coded_fraction"], compiled["coded_reason"]) == (None, "the transformer is compiled")
    named = [
        {"name": name, "degree": 2, "command": "x", **figures}
        for name, figures in (("stock", exact), ("fast", compiled))
    ]
    assert any("the transformer is compiled" in note for note in report.notes({"runs": named}))
    named[1] |= {"name": "exact", **exact}
    assert not any("coded" in note for note in report.notes({"runs": named}))


def test_each_side_says_what_a_compiled_graph_hides(tmp_path: Path) -> None:
    silent = Outcome.read([leave(tmp_path / "silent", *[[run(step(0.1))]] * 2)], 1)
    seen = Outcome.read([leave(tmp_path / "seen", *[[run(step(0.1, flat=0.01))]] * 2)], 1)
    for sides, words in (((silent, silent), "Of stock and of exact, "), ((seen, silent), "Of exact, ")):
        runs = [
            {"name": name, "degree": 2, "command": "xdit --use_torch_compile", **figures(side, side, tmp_path)}
            for name, side in zip(("stock", "exact"), sides, strict=True)
        ]
        notes = " ".join(report.notes({"runs": runs}))
        assert words in notes and "they run inside compiled graphs" in notes


def test_figures_that_cannot_be_had_are_null(tmp_path: Path) -> None:
    silent = [[run(step(0.1))]] * 2
    stock = Outcome.read([leave(tmp_path / "stock", *silent)], 1)
    for name, latents in {"none": None, "nan": torch.full((8,), torch.nan), "shape": torch.zeros(3)}.items():
        found = figures(Outcome.read([leave(tmp_path / name, *silent, latents=latents)], 1), stock, tmp_path)
        assert found["a2a_seconds"] is found["bytes"] is None
        assert found["latents"]["max_abs"] is found["latents"]["psnr_db"] is None
        assert found["image"] == {"psnr_db": None, "ssim": None, "path": None}
        json.dumps(found, allow_nan=False)
    assert fidelity.compare_latents(tmp_path / "nan/latents.safetensors", tmp_path / "nan/latents.safetensors") == {
        "max_abs": None,
        "psnr_db": None,
    }


def test_degree_one_moves_nothing_rather_than_something_unseen(tmp_path: Path) -> None:
    one, two = (Outcome.read([leave(tmp_path / str(ranks), *[[run(step(0.1))]] * ranks)], 1) for ranks in (1, 2))
    found = figures(one, one, tmp_path)
    assert (found["a2a_seconds"], found["bytes"]) == (0, {})
    with pytest.raises(record.RecordError, match="different numbers of ranks"):
        figures(one, two, tmp_path)


class Page(HTMLParser):
    """What a page shows and what it refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.images = 0
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.images += tag == "img"
        self.references += [value for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("other", [{}, {"latents_sha256": "other"}], ids=["equal", "different"])
def test_reports(tmp_path: Path, other: dict) -> None:
    figures = a_record(tmp_path, **other)
    page = report.write(figures, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == figures
    html = page.read_text()
    parsed = Page(html)
    assert parsed.open == []
    assert parsed.images == (4 if other else 3)
    assert all(reference.startswith("data:image/") for reference in parsed.references)
    assert "url(" not in html
    assert "@import" not in html
    assert "M&lt;1&gt;" in html
    assert "M<1>" not in html
    for words in (
        *report.verdict(figures),
        "xdit stock",
        "xdit exact",
        "100.0 ms",
        "46.67 kB",
        "trace-stock.json.gz",
    ):
        assert words in html.replace("&#39;", "'")
    assert ("The pictures are bit-identical" in html) == (not other)
    assert ("85 times amplified" in html) == bool(other)
    assert (tmp_path / "difference-exact.png").exists() == bool(other)
    if other:
        assert Image.open(tmp_path / "difference-exact.png").getextrema()[0] == (255, 255)


def test_a_report_without_pictures_or_traffic(tmp_path: Path) -> None:
    side = Outcome.read([leave(tmp_path / "records/stock", *[[run(step(0.1))]] * 2)], 1)
    one = {"name": "stock", "model": None, "degree": 2, "command": "x", "trace": None, **figures(side, side, tmp_path)}
    figures_of_both = {"command": "cocodiff", "repeats": 1, "launches": "one", "runs": [one, {**one, "topology": None}]}
    html = report.write({**host.header(), **figures_of_both}, tmp_path).read_text()
    assert Page(html).images == 1
    assert "perfetto" not in html
    for words in ("left this run to stock", "could not be seen", "returned no picture"):
        assert words in html
