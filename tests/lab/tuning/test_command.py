"""`cocodiff tune`: the command itself, on the small trained model."""

import json
from pathlib import Path
from unittest import mock

import pytest

from tests import ranks
from xfuser_cocodiff import cli
from xfuser_cocodiff.engine.compression import bit_allocation
from xfuser_cocodiff.lab.tuning import report
from xfuser_cocodiff.lab.tuning.tune import CHECKS


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--bytes", "2"], "--bytes 2 is not valid"),
        (["--psnr", "-3"], "--psnr -3 is not valid"),
        (["--psnr", "50", "--steps", "2"], "--steps 2 at least 3"),
        (["--psnr", "50", "--prompts", "nowhere.txt"], "--prompts 'nowhere.txt' is not valid: No such file"),
        (["--psnr", "50", "--slow_axes", "tile"], "--slow_axes 'tile' is not valid"),
    ],
)
def test_bad_input_is_named(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    assert cli.main(["tune", "--out", str(tmp_path / "tuned.json"), *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("decibels", "is_poor"), [(24.7, True), (29.9, True), (30.0, False), (48.0, False)])
def test_poor_quality_on_held_out_prompts_is_said(decibels: float, is_poor: bool) -> None:
    said = report.caution({"held_out": {"psnr_db_mean": decibels}, "target": {"bytes": 0.15}})
    assert bool(said) == is_poor
    if said:
        assert f"{decibels:.1f} dB" in said and "--bytes 0.15" in said and "--psnr" in said


def broken_off_and_resumed(rank: int, folder: str) -> list[int]:
    """The status of each call, and how many runs had been made by then."""
    from xfuser_cocodiff.lab.comparison.quality import QualityEvaluator

    generate, made = QualityEvaluator.generate, []

    def counted(judge: QualityEvaluator, *given: object) -> object:
        made.append(given)
        if len(made) == 6:
            raise KeyboardInterrupt
        return generate(judge, *given)

    out = Path(folder, "tuned.json")
    prompts = Path(folder, "prompts.txt")
    prompts.write_text("a slice of a sponge\na photo of a cat\n\na slice of a stone\n")
    command = ["tune", "--steps", "4", "--seeds", "1", "--bytes", "0.35", "--prompts", str(prompts), "--out", str(out)]
    command += ["--sheet", str(Path(folder, "sheet.png"))]
    found = []
    with mock.patch.object(QualityEvaluator, "generate", counted):
        for _ in range(3):
            found.append((cli.main(command), len(made)))
    return found


@pytest.mark.slow  # test_tune has the search, and this loads a model and runs it some twenty times
@pytest.mark.usefixtures("hub")
def test_it_goes_on_where_it_was_and_writes_what_can_be_used(tmp_path: Path) -> None:
    [[(first, runs), (second, all_runs), (third, with_check)]] = ranks.run(broken_off_and_resumed, 1, str(tmp_path))
    assert (first, runs, second, third) == (130, 6, 0, 0)
    given = json.loads((tmp_path / "tuned.json").read_text())
    evidence, held_out = given["evidence"], given["held_out"]
    trials = json.loads((tmp_path / "tuned.json.part").read_text())["trials"]
    # Exact pictures twice, and the run that was broken off; all others once, and the check, whose pictures are shown.
    assert all_runs == len(trials) + 2 + 1 + CHECKS
    assert with_check == all_runs + CHECKS
    assert evidence["prompts"] == ["a slice of a sponge", "a slice of a stone"]
    assert held_out["prompts"] == ["a photo of a cat"] and not {*held_out["seeds"]} & {*evidence["seeds"]}
    assert evidence["bytes_slow_fraction"] <= 0.35 + 1e-9
    assert given["target"] == {"bytes": 0.35}
    found = bit_allocation.read(f"@{tmp_path / 'tuned.json'}")
    assert found.model == "FLUX.1-dev" and len(found.layers) == 6
    assert {*held_out["modes"]} == {"balanced", "fast"}
    assert held_out["psnr_db_mean"] > 25
    assert (tmp_path / "sheet.png").exists()
