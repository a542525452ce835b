"""`cocodiff quality`: a small judgement on the trained model, and its command line."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import ranks
from tests.quick import slow_but
from xfuser_cocodiff import cli
from xfuser_cocodiff.engine.settings.config import CocoDiffConfig
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.lab.comparison import quality
from xfuser_cocodiff.lab.models import hub

CONFIG = CocoDiffConfig(topology=Topology.flat(1), virtual=Topology.parse("2x2"), slow_axes=("node",))


def judge(rank: int) -> tuple[dict, quality.Gallery, np.ndarray]:
    one = quality.QualityEvaluator("FLUX.1-dev", CONFIG, seeds=2, steps=6, size=128, dtype=torch.float32)
    rows = quality.rows(["balanced@bits=8;bits_o=8", "balanced@bits=2;bits_o=2", "paper"], sweep=False)
    record, gallery = quality.measure(one, rows, ["center"], lambda what: None)
    others = [
        quality.Row("balanced", None, True, quality.FP8),
        *(quality.Row("balanced", f"bits={bits},bits_o=1", True, quality.COMPACTFUSION) for bits in (8, 2)),
    ]
    record["others"] = quality.measure(one, others, [], lambda what: None)[0]["rows"]
    exact = quality.Row("exact", None, sweep=False)
    first, second = one.generate(exact), one.generate(exact)
    assert np.array_equal(first.values, second.values) and first.bytes_slow_fraction == 1
    inpainted = one.inpaint(exact, "center").values
    truth, hidden = one.truth("center")
    assert np.abs(inpainted - truth)[:, ~hidden].mean() < 0.5 * np.abs(first.values - truth)[:, ~hidden].mean()
    return record, gallery, first.values


def init_beside_another_process(both: object, answers: object) -> None:
    import torch.distributed as dist

    from xfuser_cocodiff.xdit.launching import single_rank

    os.environ["MASTER_PORT"] = "12355"  # as xfuser.runner has it where there is none, for all alike

    single_rank.init_single_rank()
    both.wait(60)  # each has met itself while the other is there
    one = torch.ones(1)
    dist.all_reduce(one)
    answers.put((dist.get_world_size(), one.item()))


def test_two_may_run_at_once() -> None:
    both, answers = ranks.context.Barrier(2), ranks.context.Queue()
    processes = [ranks.context.Process(target=init_beside_another_process, args=(both, answers)) for _ in range(2)]
    for process in processes:
        process.start()
    assert [answers.get(timeout=60) for _ in processes] == [(1, 1.0)] * 2
    for process in processes:
        process.join()


@pytest.mark.slow  # of a random model this is quick
@pytest.mark.usefixtures("hub")
def test_codecs_are_judged_on_the_trained_model(tmp_path: Path, capsys) -> None:
    [(record, gallery, pictures)] = ranks.run(judge, 1)
    assert pictures.shape == (2, 128, 128)
    assert not np.array_equal(pictures[0], pictures[1])
    eight, two, paper = record["rows"]
    assert eight["psnr_db_mean"] > two["psnr_db_mean"] > 25
    assert eight["psnr_db_mean"] > paper["psnr_db_mean"]
    assert two["bytes_slow_fraction"] < eight["bytes_slow_fraction"] < paper["bytes_slow_fraction"] < 1
    # A bit for each of the 32 of a value, a byte of scale for 16 values, and gaps in messages.
    assert eight["bytes_slow_fraction"] == pytest.approx((8 + 8 / 16) / 32, rel=1e-2)
    fp8, keys, fewer = record["others"]
    assert fp8["bytes_slow_fraction"] == 8 / 32 and 25 < fp8["psnr_db_mean"] < eight["psnr_db_mean"]
    assert keys["bytes_slow_fraction"] == pytest.approx(eight["bytes_slow_fraction"], rel=1e-2)
    assert keys["psnr_db_mean"] > eight["psnr_db_mean"], "Q and O do not travel"
    assert fewer["psnr_db_mean"] < keys["psnr_db_mean"] and fewer["codec"].endswith(quality.COMPACTFUSION)
    for row in (eight, two, paper):
        assert {"psnr_db", "ssim", "mse", "psnr_db_stock", "ssim_stock", "mse_stock"} == row["inpaint"]["center"].keys()
        assert 0 < row["ssim_mean"] <= 1
    assert (eight["sweep"], paper["sweep"], record["seeds"]) == (True, False, 2)
    json.dumps(record, allow_nan=False)
    quality.show(record)
    assert "bits=8,bits_o=8" in capsys.readouterr().out
    quality.draw(record, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
    assert {task: list(made) for task, made in gallery.items()} == {
        "": ["stock", "paper"],
        "center": ["truth", "stock", "paper"],
    }
    assert np.array_equal(gallery[""]["stock"], pictures)
    quality.draw_pictures(gallery, tmp_path / "sheet.png")
    assert (tmp_path / "sheet.png").stat().st_size > 10000


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mode", "exact"], "--mode 'exact' is not valid; valid are paper, balanced, fast"),
        (["--mode", "fast@bits=3"], "'3' is not valid for bits"),
        (["--virtual", "2y2"], "'2y2' is not valid"),
        (["--seeds", "0"], "--seeds 0"),
        (["--memory_budget", "-1"], "--memory_budget -1.0 is not valid"),
        (["--slow_axes", "tile"], "--slow_axes 'tile' is not valid; --virtual node=2,gpu=2 has node, gpu"),
        (["--virtual", "4x1", "--slow_axes", "gpu"], "--slow_axes 'gpu' is not valid; --virtual node=4,gpu=1 has node"),
    ],
)
def test_bad_usage(arguments: list[str], words: str, capsys) -> None:
    assert cli.main(["quality", *arguments]) == 2
    assert words in capsys.readouterr().err


def judge_others(rank: int, model: str, dtype: torch.dtype, *asked: str) -> tuple[dict, quality.Gallery]:
    one = quality.QualityEvaluator(model, CONFIG, seeds=2, steps=4, size=64, dtype=dtype)
    return quality.measure(one, quality.rows(asked, sweep=False), [], lambda what: None)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("model", slow_but(["Wan2.1-T2V"], ["Wan2.1-T2V", "Wan2.2-T2V", "Hunyuanvideo-1.5"]))
def test_videos_are_judged_by_all_their_frames(model: str, tmp_path: Path, capsys) -> None:
    hub.write_cache(Path(os.environ["HF_HOME"]), [model])
    asked = ("balanced", "balanced@bits=1;bits_o=1", "paper@warmup=4")
    [(record, gallery)] = ranks.run(judge_others, 1, model, torch.float32, *asked)
    made = gallery[""]
    assert {name: videos.shape for name, videos in made.items()} == {
        name: (2, 9, 64, 64) for name in ("stock", "balanced")
    }
    assert np.abs(np.diff(made["stock"], axis=1)).mean((0, 2, 3)).min() > 0, "nothing moves"
    balanced, one, exact = record["rows"]
    wanted = [-10 * np.log10(np.mean((a - b) ** 2)) for a, b in zip(made["stock"], made["balanced"], strict=True)]
    assert balanced["psnr_db_mean"] == pytest.approx(np.mean(wanted))
    assert one["psnr_db_mean"] < balanced["psnr_db_mean"] and one["ssim_mean"] < balanced["ssim_mean"] < 1
    assert exact["bit_equal"] and exact["ssim_mean"] == 1
    quality.show(record)
    told = capsys.readouterr().out
    assert "equal" in told and "no inpainting" in told
    quality.draw_pictures(gallery, tmp_path / "sheet.png")
    assert (tmp_path / "sheet.png").stat().st_size > 10000


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("model", slow_but([], ["FLUX.2-dev", "SD3.5", "Qwen-Image"]))
def test_every_family_can_be_judged_on_one_rank(model: str) -> None:
    asked = ("balanced@bits=8;bits_o=8", "fast@bits=1;bits_o=1", "paper@warmup=4")
    [(record, _)] = ranks.run(judge_others, 1, model, torch.bfloat16, *asked)
    assert record["inpaints"]
    eight, one, exact = record["rows"]
    assert one["bytes_slow_fraction"] < eight["bytes_slow_fraction"] < 1
    assert 10 < one["psnr_db_mean"] < eight["psnr_db_mean"]
    assert exact["bit_equal"], "attention that is led through USP is not stock's"
