"""`cocodiff tune` on the small trained model."""

import json
from pathlib import Path
from unittest import mock

import pytest

from tests import ranks
from xfuser_cocodiff import cli
from xfuser_cocodiff.cli import tune
from xfuser_cocodiff.engine.compression import bit_allocation
from xfuser_cocodiff.lab.tuning import report
from xfuser_cocodiff.lab.tuning.tune import HELD_OUT_RUNS


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--bytes", "2"], "--bytes 2 is not valid"),
        (["--psnr", "-3"], "--psnr -3 is not valid"),
        (["--psnr", "50", "--steps", "2"], "--steps 2 at least 3"),
        (["--psnr", "50", "--prompts", "nowhere.txt"], "--prompts 'nowhere.txt' is not valid: No such file"),
        (["--psnr", "50", "--slow_axes", "tile"], "--slow_axes 'tile' is not valid"),
    ],
)
def test_invalid_options_are_reported(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    assert cli.main(["tune", "--out", str(tmp_path / "tuned.json"), *arguments]) == 2
    assert text in capsys.readouterr().err


def test_held_out_prompts_are_not_tuned_on() -> None:
    assert tune._split_prompts(["a cat", "a dog", "a house"]) == (["a cat", "a house"], ["a dog"])
    assert tune._split_prompts(["a cat"]) == (["a cat"],) * 2


@pytest.mark.parametrize(("decibels", "is_poor"), [(24.7, True), (29.9, True), (30.0, False), (48.0, False)])
def test_poor_quality_on_held_out_prompts_is_a_warning(decibels: float, is_poor: bool) -> None:
    warning = report.quality_warning({"held_out": {"psnr_db_mean": decibels}, "target": {"bytes": 0.15}})
    assert bool(warning) == is_poor
    if warning:
        assert f"{decibels:.1f} dB" in warning and "--bytes 0.15" in warning and "--psnr" in warning


def interrupted_and_resumed(rank: int, folder: str) -> list[int]:
    """Run the command three times, and return each exit status with the number of runs so far."""
    from xfuser_cocodiff.lab.comparison.quality import QualityEvaluator

    generate, generated = QualityEvaluator.generate, []

    def counted(evaluator: QualityEvaluator, *arguments: object) -> object:
        generated.append(arguments)
        if len(generated) == 6:
            raise KeyboardInterrupt
        return generate(evaluator, *arguments)

    out = Path(folder, "tuned.json")
    prompts = Path(folder, "prompts.txt")
    prompts.write_text("a slice of a sponge\na photo of a cat\n\na slice of a stone\n")
    command = ["tune", "--steps", "4", "--seeds", "1", "--bytes", "0.35", "--prompts", str(prompts), "--out", str(out)]
    command += ["--sheet", str(Path(folder, "sheet.png"))]
    statuses = []
    with mock.patch.object(QualityEvaluator, "generate", counted):
        for _ in range(3):
            statuses.append((cli.main(command), len(generated)))
    return statuses


@pytest.mark.slow  # test_tune has the search; this runs a model some twenty times
@pytest.mark.usefixtures("hub")
def test_interrupted_command_resumes_and_writes_a_schedule(tmp_path: Path) -> None:
    [[(first, runs), (second, all_runs), (third, with_held_out)]] = ranks.run(interrupted_and_resumed, 1, str(tmp_path))
    assert (first, runs, second, third) == (130, 6, 0, 0)
    record = json.loads((tmp_path / "tuned.json").read_text())
    evidence, held_out = record["evidence"], record["held_out"]
    trials = json.loads((tmp_path / "tuned.json.part").read_text())["trials"]
    # Exact runs twice and the interrupted run; all others once; and the held-out runs, which are not cached.
    assert all_runs == len(trials) + 2 + 1 + HELD_OUT_RUNS
    assert with_held_out == all_runs + HELD_OUT_RUNS
    assert evidence["prompts"] == ["a slice of a sponge", "a slice of a stone"]
    assert held_out["prompts"] == ["a photo of a cat"] and not {*held_out["seeds"]} & {*evidence["seeds"]}
    assert evidence["bytes_slow_fraction"] <= 0.35 + 1e-9
    assert record["target"] == {"bytes": 0.35}
    allocation = bit_allocation.read(f"@{tmp_path / 'tuned.json'}")
    assert allocation.model == "FLUX.1-dev" and len(allocation.layers) == 6
    assert {*held_out["modes"]} == {"balanced", "fast"}
    assert held_out["psnr_db_mean"] > 25
    assert (tmp_path / "sheet.png").exists()
