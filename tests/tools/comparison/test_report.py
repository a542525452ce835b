"""Metrics and reports of `cocodiff compare`, from synthetic records."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from xfuser_cocodiff.tools.comparison import fidelity, record, report
from xfuser_cocodiff.tools.comparison.compare import compare


def step(seconds: float, **axes: float) -> dict:
    """Return a step as the recorder writes it: seconds by axis, and 1 kB sent per millisecond."""
    sent = {axis: s * 1e6 for axis, s in axes.items()}
    return {"seconds": seconds, "a2a_seconds": axes, "sent_bytes": sent}


def run(*steps: dict, digest: str = "same", memory: int = 1000) -> dict:
    """Return a run as the recorder writes it."""
    totals = {"peak_memory_bytes": memory, "latents_sha256": digest, "codecs": None}
    return {"total_steps": len(steps), "steps": steps, **totals}


def write_records(
    folder: Path,
    *ranks: list[dict],
    latents: torch.Tensor | None = None,
    shade: int | None = None,
    mode: str | None = None,
    arguments: tuple[str, ...] = (),
) -> Path:
    """Write the files of the recorder: the runs of each rank, rank 0's latents and the last rank's image."""
    folder.mkdir(parents=True)
    for rank, runs in enumerate(ranks):
        engine = {"rank": rank, "ranks": len(ranks), "degree": len(ranks), "ring_degree": 1, "topology": "gpu=2"}
        engine |= {"slow_axes": ["gpu"], "exchange": {"gpu": "kv"}, "device": "CPU, threads per rank: 1"}
        engine |= {"mode": mode, "arguments": ["xdit", *arguments]}
        (folder / f"rank{rank}.json").write_text(json.dumps({**engine, "runs": runs}))
    if latents is not None:
        save_file({"latents": latents}, folder / "latents.safetensors")
    if shade is not None:
        Image.new("RGB", (32, 24), (shade, 90, 90)).save(folder / f"image{len(ranks) - 1}.png")
    return folder


def compared(tmp_path: Path, stock: Any, plugin: Any, mode: str = "exact", repeats: int = 1, **files: Any) -> dict:
    """Return the record of two variants, given the runs of each of their ranks."""
    files = {"arguments": ("--model", "M<1>"), **files}
    folders = [
        write_records(tmp_path / "records/stock", *stock, **files),
        write_records(tmp_path / f"records/{mode}", *plugin, mode=mode, **files),
    ]
    return {**compare(folders, tmp_path, repeats), "command": "cocodiff"}


def make_record(tmp_path: Path, **other: object) -> dict:
    """Return a record of two ranks and two repeats; `other` changes the last run of the plugin's rank 1."""
    fast, slow = step(0.1, flat=0.04), step(0.2, flat=0.06)
    usual, different = run(slow, fast, fast), float(bool(other))
    latents, arguments = torch.arange(33, dtype=torch.bfloat16) / 8, ("--model", "M<1>")
    stock, exact = tmp_path / "records/stock", tmp_path / "records/exact"
    write_records(stock, *[[usual] * 3] * 2, latents=latents, shade=100, arguments=arguments)
    ranks = [usual] * 3, [usual, usual, {**usual, **other}]
    files = {"latents": latents + different, "shade": 100 + int(different) * 3, "arguments": arguments}
    write_records(exact, *ranks, mode="exact", **files)
    return {**compare([stock, exact], tmp_path, 2), "command": "cocodiff"}


def test_step_time_is_that_of_the_slowest_rank_without_the_first_step() -> None:
    repeat = [run(step(9.0), step(1.0), step(4.0), step(2.0)), run(step(1.0), step(3.0), step(2.0), step(2.5))]
    assert record.step_seconds(repeat) == 3.0
    assert record.step_seconds([run(step(9.0))]) == 9.0


def test_communication_is_a_mean_over_ranks_by_axis() -> None:
    first = [run(step(1, gpu=0.9, tile=0.9), step(1, gpu=0.2, tile=0.1)), run(step(1, gpu=0.9), step(1, gpu=0.4))]
    second = [run(step(1, gpu=0.9), step(1, gpu=0.6))] * 2
    assert record.a2a_seconds([first, second]) == pytest.approx({"gpu": 0.45, "tile": 0.025})
    assert record.sent_bytes([[run(step(1, gpu=0.002), step(1, gpu=0.004))] * 2]) == {"gpu": 3000}


def test_steps_with_timed_communication_do_not_count_for_step_time() -> None:
    def untimed(seconds: float) -> dict:
        return {**step(seconds), "is_timed": False}

    timed = {**step(0.9, gpu=0.3), "is_timed": True}
    steps = [untimed(5.0), untimed(0.4), untimed(0.6), timed, untimed(0.5)]
    repeats = [[run(*steps)], [run(*steps)]]
    assert record.step_seconds(repeats[0]) == 0.5
    assert record.a2a_seconds(repeats) == {"gpu": 0.3}
    assert record.sent_bytes(repeats) == {"gpu": 60_000}
    assert record.step_seconds([run(untimed(5.0), timed)]) == 0.9, "no other step is left"


def test_peak_memory_is_that_of_the_rank_with_most(tmp_path: Path) -> None:
    ranks = [[run(step(0.1), memory=memory)] * 2 for memory in (2000, 3000)]
    assert compared(tmp_path, ranks, ranks)["runs"][1]["peak_memory_bytes"] == 3000


def test_the_last_runs_of_as_many_steps_are_compared(tmp_path: Path) -> None:
    """Others warm up, and a variant may have recorded more of them."""
    short, runs = run(step(9.0)), [run(*[step(float(number))] * 2) for number in range(3)]
    record_of_both = compared(tmp_path, [[short, *runs]] * 2, [runs] * 2, repeats=9)
    assert [each["step_seconds"] for each in record_of_both["runs"]] == [[0.0, 1.0, 2.0]] * 2
    folders = [tmp_path / "records" / name for name in ("stock", "exact")]
    assert compare(folders, tmp_path, 2)["runs"][0]["step_seconds"] == [1.0, 2.0]


def test_incomplete_records_are_named(tmp_path: Path) -> None:
    one = [run(step(1.0))]
    good = write_records(tmp_path / "good", one, one)
    for folder, words in (
        (tmp_path / "nothing", "no rank recorded"),
        (write_records(tmp_path / "uneven", one * 3, one), r"incomplete; runs by rank and launch: \[\[3\], \[1\]\]"),
        (write_records(tmp_path / "short", [run(*[step(1.0)] * 2)], [run(*[step(1.0)] * 2)]), "2 steps, and 1 in"),
        (write_records(tmp_path / "few", one), "1 ranks, and 2 in"),
    ):
        with pytest.raises(record.RecordError, match=words):
            compare([good, folder], tmp_path, 1)
    (good / "rank0.json").unlink()
    with pytest.raises(record.RecordError, match="the records of ranks 0 of 2 are missing; copy those of all nodes"):
        compare([good, good], tmp_path, 1)
    plugin = write_records(tmp_path / "plugin", one, mode="exact")
    with pytest.raises(record.RecordError, match="recorded in mode exact; the first folder must be of stock xDiT"):
        compare([plugin, plugin], tmp_path, 1)


def test_record_has_the_documented_keys(tmp_path: Path) -> None:
    stock, exact = make_record(tmp_path)["runs"]
    required = ["name", "model", "degree", "topology", "step_seconds", "a2a_seconds", "hidden_seconds", "bytes"]
    assert {*required, "peak_memory_bytes", "latents", "image"} <= stock.keys() == exact.keys()
    assert exact["step_seconds"] == [0.1, 0.1]
    assert exact["ratio_to_stock"] == 1
    assert (exact["slow_axes"], exact["exchange"]) == (["gpu"], {"gpu": "kv"})
    assert exact["a2a_seconds"] == pytest.approx(0.04)
    assert exact["hidden_seconds"] is None
    assert exact["bytes"] == {"flat": 46667}
    assert exact["latents"] | {"differs_at": []} == exact["latents"]
    assert exact["latents"]["bit_equal"]
    assert exact["latents"]["max_abs"] == 0
    assert exact["latents"]["psnr_db"] is None
    assert exact["image"] == {"psnr_db": None, "ssim": 1.0, "path": "records/exact/image1.png"}


def test_one_different_digest_is_not_bit_identical(tmp_path: Path) -> None:
    comparison = make_record(tmp_path, latents_sha256="other")
    exact = comparison["runs"][1]
    assert exact["latents"]["bit_equal"] is False
    assert exact["latents"]["differs_at"] == [{"repeat": 1, "rank": 1}]
    assert exact["latents"]["max_abs"] == 1
    assert exact["latents"]["psnr_db"] == pytest.approx(20 * np.log10(4))
    assert exact["image"]["psnr_db"] == pytest.approx(10 * np.log10(255**2 / 3))
    assert exact["image"]["ssim"] < 1
    assert not report.passed(comparison)
    title, text = report.verdict(comparison)
    assert title == "Not bit-identical to stock"
    assert "1 of 2 runs, on 1 rank;" in text
    assert "report this as a bug" in text


def test_verdict_explains_a_different_result(tmp_path: Path) -> None:
    comparison = make_record(tmp_path, latents_sha256="other")
    comparison["runs"][1]["name"] = "fast"
    assert not report.passed(comparison)  # no compression was active
    assert "No compression was active" in report.verdict(comparison)[1]
    comparison["runs"][1]["codecs"] = {"bytes_slow_fraction": 0.1}
    assert report.passed(comparison)
    assert "mode fast is lossy" in report.verdict(comparison)[1]
    comparison["runs"][0]["latents"]["repeatable"] = False
    assert "fix the seed" in report.verdict(comparison)[1]


ENCODED = {"sent_bytes": 20, "exact_bytes": 100, "repeated": 1, "reference_bytes": 5000}
"""Codec statistics of a step: the fields that the report reads."""


ERRORS = [
    {"mean_error": 0.020, "error": {"k": 0.019, "v": 0.021}, "bits": 3.4, "yardsticks": {"fp8": 0.025, "fp4": 0.095}},
    {"mean_error": 0.022, "error": {"k": 0.021, "v": 0.023}, "bits": 3.6, "yardsticks": {"fp8": 0.027, "fp4": 0.095}},
]
"""Errors of a run on each of two ranks."""


def test_report_shows_codec_statistics(tmp_path: Path) -> None:
    stock = [[run(step(0.1), step(0.1))]] * 2
    fast = [[{**run(step(0.1), step(0.1)), "codecs": [ENCODED] * 2, **ERRORS[rank]}] for rank in range(2)]
    comparison = compared(tmp_path, stock, fast, "fast")
    named = comparison["runs"]
    assert named[0]["codecs"] is None
    assert named[1]["codecs"] == {
        "bytes_slow_fraction": 0.2,
        "repeated": 4,
        "reference_bytes": 5000,
    }
    html = report.write(comparison, tmp_path).read_text()
    assert [named[0][name] for name in ERRORS[0]] == [None, {}, None, {}], "of stock"
    assert {name: named[1][name] for name in ERRORS[0]} == {
        **{"mean_error": pytest.approx(0.021), "error": {"k": pytest.approx(0.02), "v": pytest.approx(0.022)}},
        **{"bits": 3.5, "yardsticks": {"fp8": pytest.approx(0.026), "fp4": 0.095}},
    }
    shown = "error 2.10% (K 2.00%, V 2.20%) at 3.50 bits per value; FP8 2.60%; FP4 9.50% on the same tensors"
    for text in ("20.0 %", "5.00 kB", "4 messages had values", shown):
        assert text in html


def test_compressed_fraction_or_reason_is_recorded(tmp_path: Path) -> None:
    def compared_with(mode: str, codecs: list | None, **more: object) -> dict:
        stock = {**run(step(0.1)), "coded_reason": "stock xDiT"}
        plugin = {**run(step(0.1)), "codecs": codecs, **more}
        return compared(tmp_path / mode, [[stock]] * 2, [[plugin]] * 2, mode)

    fast = compared_with("fast", [ENCODED])["runs"][1]
    assert (fast["coded_fraction"], fast["coded_reason"]) == (0.2, None)
    exact = compared_with("exact", None, coded_reason="mode exact")
    assert (exact["runs"][1]["coded_fraction"], exact["runs"][1]["coded_reason"]) == (None, "mode exact")
    nothing = {**ENCODED, "sent_bytes": 0, "exact_bytes": 0}
    compiled = compared_with("balanced", [nothing], coded_reason="the transformer is compiled")
    assert compiled["runs"][1]["coded_reason"] == "the transformer is compiled"
    assert any("the transformer is compiled" in note for note in report.notes(compiled))
    assert not any("compressed" in note for note in report.notes(exact))


@pytest.mark.parametrize(("ring_degree", "is_silent"), [(1, True), (4, False)])
def test_a_ring_without_ulysses_communicates(tmp_path: Path, ring_degree: int, is_silent: bool) -> None:
    compared = make_record(tmp_path)
    compared["runs"][1] |= {"degree": 1, "ring_degree": ring_degree}
    assert any("there is no communication" in note for note in report.notes(compared)) == is_silent


def test_unknown_metrics_are_null(tmp_path: Path) -> None:
    uncounted = [[run(step(0.1))]] * 2
    for name, latents in {"none": None, "nan": torch.full((8,), torch.nan)}.items():
        metrics = compared(tmp_path / name, uncounted, uncounted, latents=latents)["runs"][1]
        assert metrics["a2a_seconds"] is metrics["bytes"] is None
        assert metrics["latents"]["max_abs"] is metrics["latents"]["psnr_db"] is None
        assert metrics["image"] == {"psnr_db": None, "ssim": None, "path": None}
        json.dumps(metrics, allow_nan=False)
    for size in (3, 4):
        save_file({"latents": torch.zeros(size)}, tmp_path / f"{size}.safetensors")
    files = (tmp_path / "3.safetensors", tmp_path / "4.safetensors")
    assert fidelity.compare_latents(*files) == {"max_abs": None, "psnr_db": None}


@pytest.mark.parametrize("other", [{}, {"latents_sha256": "other"}], ids=["equal", "different"])
def test_report_is_one_self_contained_page(tmp_path: Path, other: dict) -> None:
    comparison = make_record(tmp_path, **other)
    page = report.write(comparison, tmp_path)
    assert json.loads((tmp_path / "report.json").read_text()) == comparison
    html = page.read_text()
    assert html.count("<img") == (4 if other else 3)
    references = re.findall(r'\b(?:src|href|srcset|data|action)="([^"]*)', html)
    assert all(reference.startswith("data:image/") for reference in references)
    assert not re.search(r"url\(|@import", html)
    assert "M&lt;1&gt;" in html and "M<1>" not in html
    for text in (
        *report.verdict(comparison),
        "collectives of each axis</th><td>-</td><td>gpu kv",
        "xdit --model",
        "100.0 ms",
        "46.67 kB",
    ):
        assert text in html.replace("&#39;", "'")
    assert ("The images are bit-identical" in html) == (not other)
    assert ("amplified 85 times" in html) == bool(other)
    assert (tmp_path / "difference-exact.png").exists() == bool(other)
    if other:
        assert Image.open(tmp_path / "difference-exact.png").getextrema()[0] == (255, 255)
