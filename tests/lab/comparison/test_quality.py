"""`cocodiff quality`: codecs on the small trained model, and the command line."""

import argparse
import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import ranks
from tests.quick import slow_but
from xfuser_cocodiff import cli
from xfuser_cocodiff.cli import quality as quality_command
from xfuser_cocodiff.engine.compression.modes import PRESETS
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.lab.comparison import quality
from xfuser_cocodiff.lab.models import hub
from xfuser_cocodiff.xdit.session.session import active
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig

CONFIG = CocoDiffConfig(topology=Topology.flat(1), virtual=Topology.parse("2x2"), slow_axes=("node",))


def evaluate(rank: int) -> tuple[dict, quality.Gallery, np.ndarray]:
    evaluator = quality.QualityEvaluator("FLUX.1-dev", CONFIG, seeds=2, steps=6, size=128, dtype=torch.float32)
    cases = quality.parse_cases(["balanced@bits=8", "balanced@bits=2", "paper"])
    record, gallery = quality.measure(evaluator, cases, ["center"], lambda case: None)
    baselines = [
        quality.CodecCase("balanced", None, True, quality.FP8),
        *(quality.CodecCase("balanced", f"bits={bits}", True, quality.COMPACTFUSION) for bits in (8, 2)),
    ]
    record["baselines"] = quality.measure(evaluator, baselines, [], lambda case: None)[0]["rows"]
    exact = quality.CodecCase("exact", None, sweep=False)
    first, second = evaluator.generate(exact), evaluator.generate(exact)
    assert np.array_equal(first.values, second.values) and first.bytes_slow_fraction == 1
    inpainted = evaluator.inpaint(exact, "center").values
    originals, hidden = evaluator.originals("center")
    assert np.abs(inpainted - originals)[:, ~hidden].mean() < 0.5 * np.abs(first.values - originals)[:, ~hidden].mean()
    return record, gallery, first.values


def init_beside_another_process(barrier: object, results: object) -> None:
    import torch.distributed as dist

    from xfuser_cocodiff.lab.launching import single_rank

    os.environ["MASTER_PORT"] = "12355"  # xfuser.runner's default, the same for all processes
    single_rank.init_single_rank()
    barrier.wait(60)  # both processes are initialized at the same time
    one = torch.ones(1)
    dist.all_reduce(one)
    results.put((dist.get_world_size(), one.item()))


def test_two_processes_run_at_once() -> None:
    barrier, results = ranks.context.Barrier(2), ranks.context.Queue()
    processes = [ranks.context.Process(target=init_beside_another_process, args=(barrier, results)) for _ in range(2)]
    for process in processes:
        process.start()
    assert [results.get(timeout=60) for _ in processes] == [(1, 1.0)] * 2
    for process in processes:
        process.join()


@pytest.mark.slow  # with a random model it is quick
@pytest.mark.usefixtures("hub")
def test_codecs_on_the_trained_model(tmp_path: Path, capsys) -> None:
    [(record, gallery, pictures)] = ranks.run(evaluate, 1)
    assert pictures.shape == (2, 128, 128)
    assert not np.array_equal(pictures[0], pictures[1])
    eight, two, paper = record["rows"]
    assert eight["psnr_db_mean"] > two["psnr_db_mean"] > 25
    assert eight["psnr_db_mean"] > paper["psnr_db_mean"]
    assert two["bytes_slow_fraction"] < eight["bytes_slow_fraction"] < paper["bytes_slow_fraction"] < 1
    # 8 of 32 bits per value, a byte of scale for four tokens of 16 values, and padding of messages.
    assert eight["bytes_slow_fraction"] == pytest.approx((8 + 8 / 64) / 32, rel=1e-2)
    fp8, ring_8, ring_2 = record["baselines"]
    assert fp8["bytes_slow_fraction"] == 8 / 32 and 25 < fp8["psnr_db_mean"] < eight["psnr_db_mean"]
    assert ring_8["bytes_slow_fraction"] == pytest.approx(eight["bytes_slow_fraction"], rel=1e-2)
    assert ring_8["psnr_db_mean"] == pytest.approx(eight["psnr_db_mean"], abs=2)
    assert ring_2["psnr_db_mean"] < ring_8["psnr_db_mean"] and ring_2["codec"].endswith(quality.COMPACTFUSION)
    for row in (eight, two, paper):
        assert {"psnr_db", "ssim", "mse", "psnr_db_stock", "ssim_stock", "mse_stock"} == row["inpaint"]["center"].keys()
        assert 0 < row["ssim_mean"] <= 1
    assert (eight["sweep"], paper["sweep"], record["seeds"]) == (True, False, 2)
    json.dumps(record, allow_nan=False)
    quality.show(record)
    assert "bits=8" in capsys.readouterr().out
    assert {task: list(images) for task, images in gallery.items()} == {
        "": ["stock", "paper"],
        "center": ["truth", "stock", "paper"],
    }
    assert np.array_equal(gallery[""]["stock"], pictures)
    quality.draw_pictures(gallery, tmp_path / "sheet.png")
    assert (tmp_path / "sheet.png").stat().st_size > 10000


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--mode", "exact"], "--mode 'exact' is not valid; valid are paper, balanced, fast"),
        (["--mode", "fast@bits=3"], "'3' is not valid for bits"),
        (["--virtual", "2y2"], "'2y2' is not valid"),
        (["--seeds", "0"], "--seeds 0"),
        (["--memory_budget", "-1"], "--memory_budget -1.0 is not valid"),
        (["--slow_axes", "tile"], "--slow_axes 'tile' is not valid; --virtual node=2,gpu=2 has node, gpu"),
        (["--slow_axes", "gpu"], "--slow_axes 'gpu' is not valid: they must be the outermost of node=2,gpu=2"),
        (["--virtual", "4x1", "--slow_axes", "gpu"], "--slow_axes 'gpu' is not valid; --virtual node=4,gpu=1 has node"),
        (["--a2a", "gpu,node=kv"], "--a2a 'gpu,node=kv' is not valid; valid are 'flat', 'hierarchical', or stages"),
        (["--a2a", "hierarchical:tile,node=kv"], "--a2a 'hierarchical:tile,node=kv' must name each of the axes node, "),
        (
            ["--a2a", "hierarchical:gpu+node=kv"],
            "--a2a 'hierarchical:gpu+node=kv' is not valid: it gathers K and V along node, gpu; valid with =kv are the "
            "slow axes node (--slow_axes), 'hierarchical' and 'auto'",
        ),
        (
            ["--a2a", "hierarchical", "--virtual", "ring:2x2"],
            "--a2a 'hierarchical' is not valid with --virtual ring:2x2, a ring of K and V; valid is 'auto'",
        ),
    ],
)
def test_invalid_options_are_reported(arguments: list[str], text: str, capsys) -> None:
    assert cli.main(["quality", *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("slow_axes", ["node,gpu", "gpu,node"])
def test_a_plan_may_gather_along_all_slow_axes_in_any_order(slow_axes: str) -> None:
    arguments = ["quality", "--virtual", "2x3x2", "--slow_axes", slow_axes, "--a2a", "hierarchical:tile,gpu+node=kv"]
    parser = argparse.ArgumentParser()
    quality_command.add_parser(parser.add_subparsers())
    config = quality_command.make_config(parser.parse_args(arguments))
    assert config.slow_axes == config.plan.gathered_axes == ("node", "gpu")


EXCHANGE_CASES = [
    quality.CodecCase("balanced", "bits=4", True, "balanced"),
    quality.CodecCase("balanced", "bits=4", True, quality.MODES_BY_HEADS),
    quality.CodecCase("paper", None, False, "paper"),
    quality.CodecCase("balanced", "bits=4", True, quality.COMPACTFUSION),
]
EXCHANGES = {
    ("2x2", "auto"): [("kv",), ("heads",), ("heads",), ("ring",)],
    ("2x2", "hierarchical"): [("heads",)],  # MODES_BY_HEADS would repeat the first row
    ("4x1", "auto"): [("heads",)],
    ("4x1", "hierarchical:node=kv"): [("kv",), ("heads",)],
}
"""Exchanges of the first of EXCHANGE_CASES by --virtual and --a2a."""


def evaluate_exchange(rank: int, virtual: str, a2a: str) -> dict:
    topology, num_cases = Topology.parse(virtual), max(2, len(EXCHANGES[virtual, a2a]))
    config = replace(CONFIG, virtual=topology, plan=None if a2a == "auto" else Plan.parse(a2a, topology))
    evaluator = quality.QualityEvaluator("SD3.5", config, seeds=1, steps=2, size=64, dtype=torch.float32)
    return quality.measure(evaluator, EXCHANGE_CASES[:num_cases], [], lambda case: None)[0]


def errors_of_modes(rank: int, model: str, steps: int) -> dict[str, float]:
    """Return the mean error of a run in each mode that promises one."""
    evaluator = quality.QualityEvaluator(model, CONFIG, seeds=1, steps=steps, size=128, dtype=torch.float32)
    cases = {mode: quality.CodecCase(mode, None, sweep=False) for mode, each in PRESETS.items() if each.error}
    return {mode: evaluator.generate(case).errors["mean_error"] for mode, case in cases.items()}


MODEL_STEPS = [*itertools.product(("FLUX.1-dev", "SD3.5", "Wan2.1-T2V"), (4, 8, 20, 50))]


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(("model", "steps"), slow_but([("FLUX.1-dev", 8)], MODEL_STEPS))
def test_modes_keep_the_error_that_they_promise(model: str, steps: int) -> None:
    """On trained models, whose change per step nothing in rate control knows."""
    hub.write_cache(Path(os.environ["HF_HOME"]), [model])
    [errors] = ranks.run(errors_of_modes, 1, model, steps)
    assert errors.keys() == {"balanced", "fast"} and 0 < errors["balanced"] < errors["fast"]
    for mode, error in errors.items():
        assert error <= (1.1 if steps >= 8 else 1.3) * PRESETS[mode].error


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(("virtual", "a2a"), slow_but([*EXCHANGES][:1], [*EXCHANGES]))
def test_rows_name_the_exchange_that_ran(virtual: str, a2a: str, capsys) -> None:
    [record] = ranks.run(evaluate_exchange, 1, virtual, a2a)
    found, expected = [tuple(row["exchanges"]) for row in record["rows"]], EXCHANGES[virtual, a2a]
    assert found == expected
    if expected[:2] == [("kv",), ("heads",)]:
        gathered, by_heads = (row["psnr_db_mean"] for row in record["rows"][:2])
        assert gathered > by_heads + 1, "Q and O are exact where K and V are gathered"
    if expected[-1] == ("ring",):
        gathered, ring = record["rows"][0], record["rows"][-1]
        assert gathered["bytes_slow_fraction"] == pytest.approx(ring["bytes_slow_fraction"], rel=0.03)
        assert gathered["psnr_db_mean"] == pytest.approx(ring["psnr_db_mean"], abs=1)
    quality.show(record)
    lines = capsys.readouterr().out.splitlines()[1:]
    texts = {"kv": "gathered K and V", "heads": "by heads", "ring": "ring"}
    for exchanges, line in zip(expected, lines, strict=False):
        assert f"  {', '.join(texts[each] for each in exchanges)}  " in line


def evaluate_guidance(rank: int) -> list[tuple[int, dict]]:
    """Return the number of coded branches and the record of a run, with the pipeline's guidance and without."""
    results = []
    for scale in (None, 1.0):
        settings = {"seeds": 1, "steps": 2, "size": 64, "dtype": torch.float32, "guidance_scale": scale}
        evaluator = quality.QualityEvaluator("SD3.5", CONFIG, **settings)
        record, _ = quality.measure(evaluator, quality.parse_cases(["balanced"]), [], lambda case: None)
        results.append((active().runtime.reports[-1].sent_bytes, record))
    with pytest.raises(ValueError, match=r"--guidance_scale 3 is not valid: the pipeline of Hunyuanvideo-1.5 has none"):
        quality.QualityEvaluator("Hunyuanvideo-1.5", CONFIG, 1, 2, 64, torch.float32, guidance_scale=3.0)
    return results


@pytest.mark.usefixtures("hub")
def test_guidance_can_be_turned_off() -> None:
    hub.write_cache(Path(os.environ["HF_HOME"]), ["Hunyuanvideo-1.5"])
    [[(guided_bytes, guided), (unguided_bytes, unguided)]] = ranks.run(evaluate_guidance, 1)
    assert unguided_bytes < 0.6 * guided_bytes, "there are two branches"
    assert (guided["guidance_scale"], unguided["guidance_scale"]) == (None, 1.0)
    assert (unguided["model"], unguided["steps"]) == ("SD3.5", 2)


def evaluate_model(rank: int, model: str, dtype: torch.dtype, *modes: str) -> tuple[dict, quality.Gallery]:
    evaluator = quality.QualityEvaluator(model, CONFIG, seeds=2, steps=4, size=64, dtype=dtype)
    return quality.measure(evaluator, quality.parse_cases(modes), [], lambda case: None)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("model", slow_but(["Wan2.1-T2V"], ["Wan2.1-T2V", "Wan2.2-T2V", "Hunyuanvideo-1.5"]))
def test_all_frames_of_videos_are_compared(model: str, tmp_path: Path, capsys) -> None:
    hub.write_cache(Path(os.environ["HF_HOME"]), [model])
    modes = ("balanced", "balanced@bits=1", "paper@warmup=4")
    [(record, gallery)] = ranks.run(evaluate_model, 1, model, torch.float32, *modes)
    images = gallery[""]
    assert {name: videos.shape for name, videos in images.items()} == {
        name: (2, 9, 64, 64) for name in ("stock", "balanced")
    }
    assert np.abs(np.diff(images["stock"], axis=1)).mean((0, 2, 3)).min() > 0, "the frames are equal"
    balanced, one, exact = record["rows"]
    expected = [-10 * np.log10(np.mean((a - b) ** 2)) for a, b in zip(images["stock"], images["balanced"], strict=True)]
    assert balanced["psnr_db_mean"] == pytest.approx(np.mean(expected))
    assert one["psnr_db_mean"] < balanced["psnr_db_mean"] and one["ssim_mean"] < balanced["ssim_mean"] < 1
    assert exact["bit_equal"] and exact["ssim_mean"] == 1
    quality.show(record)
    printed = capsys.readouterr().out
    assert "equal" in printed and "no inpainting" in printed
    quality.draw_pictures(gallery, tmp_path / "sheet.png")
    assert (tmp_path / "sheet.png").stat().st_size > 10000


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("model", slow_but([], ["FLUX.2-dev", "SD3.5", "Qwen-Image"]))
def test_every_image_family_on_one_rank(model: str) -> None:
    modes = ("balanced@bits=8", "fast@bits=1", "paper@warmup=4")
    [(record, _)] = ranks.run(evaluate_model, 1, model, torch.bfloat16, *modes)
    assert record["inpaints"]
    eight, one, exact = record["rows"]
    assert one["bytes_slow_fraction"] < eight["bytes_slow_fraction"] < 1
    assert 10 < one["psnr_db_mean"] < eight["psnr_db_mean"]
    assert exact["bit_equal"], "attention of the session differs from stock's"
