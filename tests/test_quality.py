"""`cocodiff quality`: a small judgement on the trained model, and its command line."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests import ranks
from xfuser_cocodiff import cli
from xfuser_cocodiff.bench import quality


def judge(rank: int) -> tuple[dict, np.ndarray]:
    from xfuser_cocodiff.topology import Topology

    one = quality.Judge("FLUX.1-dev", Topology.parse("2x2"), None, seeds=2, steps=6, size=128)
    rows = quality.rows(["balanced@bits=8;bits_o=8", "balanced@bits=2;bits_o=2", "paper"], sweep=False)
    record = quality.measure(one, rows, ["center"], lambda what: None)
    exact = quality.Row("exact", None, sweep=False)
    first, second = one.generate(exact), one.generate(exact)
    assert np.array_equal(first.values, second.values) and first.bytes_slow_fraction == 1
    inpainted = one.inpaint(exact, "center").values
    truth, hidden = one.truth("center")
    assert np.abs(inpainted - truth)[:, ~hidden].mean() < 0.5 * np.abs(first.values - truth)[:, ~hidden].mean()
    return record, first.values


@pytest.mark.usefixtures("hub")
def test_codecs_are_judged_on_the_trained_model(tmp_path: Path, capsys) -> None:
    [(record, pictures)] = ranks.run(judge, 1)
    assert pictures.shape == (2, 128, 128)
    assert not np.array_equal(pictures[0], pictures[1])
    eight, two, paper = record["rows"]
    assert eight["psnr_db_mean"] > two["psnr_db_mean"] > 25
    assert eight["psnr_db_mean"] > paper["psnr_db_mean"]
    assert two["bytes_slow_fraction"] < eight["bytes_slow_fraction"] < paper["bytes_slow_fraction"] < 1
    # One exact step of six; then a bit for each of the 32 of a value, and a byte of scale for 16 values.
    assert eight["bytes_slow_fraction"] == pytest.approx(1 / 6 + 5 / 6 * (8 + 8 / 16) / 32, rel=1e-3)
    for row in (eight, two, paper):
        assert {"psnr_db", "ssim", "mse", "psnr_db_stock", "ssim_stock", "mse_stock"} == row["inpaint"]["center"].keys()
        assert 0 < row["ssim_mean"] <= 1
    assert (eight["sweep"], paper["sweep"], record["seeds"]) == (True, False, 2)
    json.dumps(record, allow_nan=False)
    quality.show(record)
    assert "bits=8,bits_o=8" in capsys.readouterr().out
    quality.draw(record, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mode", "exact"], "--mode 'exact' is not valid; valid are paper, balanced, fast"),
        (["--mode", "fast@bits=3"], "'3' is not valid for bits"),
        (["--virtual", "2y2"], "'2y2' is not understood"),
        (["--seeds", "0"], "--seeds 0"),
        (["--slow_axes", "tile"], "--slow_axes 'tile' is not valid; --virtual node=2,gpu=2 has node, gpu"),
        (["--virtual", "4x1", "--slow_axes", "gpu"], "--slow_axes 'gpu' is not valid; --virtual node=4,gpu=1 has node"),
    ],
)
def test_bad_usage(arguments: list[str], words: str, capsys) -> None:
    assert cli.main(["quality", *arguments]) == 2
    assert words in capsys.readouterr().err
