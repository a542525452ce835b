"""`cocodiff quality`: codecs on the small trained model, and the command line."""

import argparse
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from models import hub
from tests import ranks
from tests.quick import slow_but
from xfuser_cocodiff import cli
from xfuser_cocodiff.cli import quality as quality_command
from xfuser_cocodiff.engine.compression.modes import PRESETS
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.tools.comparison import quality
from xfuser_cocodiff.xdit.session.session import active
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig

CONFIG = CocoDiffConfig(topology=Topology.flat(1), virtual=Topology.parse("2x2"), slow_axes=("node",))


def init_beside_another_process(barrier: object, results: object) -> None:
    import torch.distributed as dist

    from xfuser_cocodiff.tools.launching import single_rank

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


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--mode", "exact"], "--mode 'exact' is not valid; valid are paper, balanced, fast"),
        (["--mode", "fast@bits=3"], "'3' is not valid for bits"),
        (["--cocodiff-memory-budget", "-1"], "--cocodiff_memory_budget: '-1' is not valid"),
        (["--cocodiff_slow_axes", "gpu"], "--cocodiff_slow_axes: 'gpu'"),
        (["--cocodiff_a2a", "gpu,node=kv"], "--cocodiff_a2a: 'gpu,node=kv'"),
    ],
)
def test_invalid_options_are_reported(arguments: list[str], text: str, capsys) -> None:
    assert cli.main(["quality", *arguments]) == 2
    assert text in capsys.readouterr().err


COLLECTIVES = {
    ("2x2", "auto"): [("kv",), ("heads",)],
    ("2x2", "hierarchical"): [("heads",), ("heads",)],
    ("4x1", "auto"): [("heads",), ("heads",)],
    ("4x1", "hierarchical:node=kv"): [("kv",), ("heads",)],
    ("ring:2x2", "auto"): [("ring",), ("ring",)],
}
"""Collectives of 'balanced' and 'paper' by --cocodiff_virtual and --cocodiff_a2a."""


def evaluate(rank: int, virtual: str, a2a: str) -> dict:
    parser = argparse.ArgumentParser()
    quality_command.add_parser(parser.add_subparsers())
    options = parser.parse_args(["quality", "--cocodiff_virtual", virtual, "--cocodiff_a2a", a2a])
    config = quality_command.make_config(options)
    evaluator = quality.QualityEvaluator("SD3.5", config, seeds=1, steps=2, size=64, dtype=torch.float32)
    return quality.measure(evaluator, quality.parse_cases(["balanced@bits=4", "paper"]), lambda case: None)[0]


def errors_of_modes(rank: int, model: str, steps: int) -> dict[str, float]:
    """Return the mean error of a run in each mode that promises one."""
    evaluator = quality.QualityEvaluator(model, CONFIG, seeds=1, steps=steps, size=128, dtype=torch.float32)
    modes = [mode for mode, each in PRESETS.items() if each.error]
    return {mode: evaluator.generate(quality.CodecCase(mode))[1]["mean_error"] for mode in modes}


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
@pytest.mark.parametrize(("virtual", "a2a"), slow_but([*COLLECTIVES][:1], [*COLLECTIVES]))
def test_rows_name_the_collectives_that_ran(virtual: str, a2a: str, capsys) -> None:
    [record] = ranks.run(evaluate, 1, virtual, a2a)
    assert [tuple(row["exchanges"]) for row in record["rows"]] == COLLECTIVES[virtual, a2a]
    quality_command.show(record)
    lines = capsys.readouterr().out.splitlines()[1:]
    texts = {"kv": "gathered K and V", "heads": "all-to-all", "ring": "ring"}
    for names, line in zip(COLLECTIVES[virtual, a2a], lines, strict=False):
        assert f"  {', '.join(texts[each] for each in names)}  " in line


def evaluate_guidance(rank: int) -> list[tuple[int, dict]]:
    """Return the number of coded branches and the record of a run, with the pipeline's guidance and without."""
    results = []
    for scale in (None, 1.0):
        settings = {"seeds": 1, "steps": 2, "size": 64, "dtype": torch.float32, "guidance_scale": scale}
        evaluator = quality.QualityEvaluator("SD3.5", CONFIG, **settings)
        record, _ = quality.measure(evaluator, quality.parse_cases(["balanced"]), lambda case: None)
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
    return quality.measure(evaluator, quality.parse_cases(modes), lambda case: None)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("model", slow_but(["Wan2.1-T2V"], ["Wan2.1-T2V", "Wan2.2-T2V", "Hunyuanvideo-1.5"]))
def test_all_frames_of_videos_are_compared(model: str, tmp_path: Path, capsys) -> None:
    hub.write_cache(Path(os.environ["HF_HOME"]), [model])
    modes = ("balanced", "balanced@bits=1", "paper@warmup=4")
    [(record, gallery)] = ranks.run(evaluate_model, 1, model, torch.float32, *modes)
    images = gallery
    assert {name: videos.shape for name, videos in images.items()} == dict.fromkeys(("stock", *modes), (2, 9, 64, 64))
    assert np.abs(np.diff(images["stock"], axis=1)).mean((0, 2, 3)).min() > 0, "the frames are equal"
    balanced, one, exact = record["rows"]
    expected = [-10 * np.log10(np.mean((a - b) ** 2)) for a, b in zip(images["stock"], images["balanced"], strict=True)]
    assert balanced["psnr_db_mean"] == pytest.approx(np.mean(expected))
    assert one["psnr_db_mean"] < balanced["psnr_db_mean"] and one["ssim_mean"] < balanced["ssim_mean"] < 1
    assert exact["bit_equal"] and exact["ssim_mean"] == 1
    quality_command.show(record)
    assert "equal" in capsys.readouterr().out
    quality.draw_images(gallery, tmp_path / "sheet.png")
    assert (tmp_path / "sheet.png").stat().st_size > 10000


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("model", slow_but([], ["FLUX.2-dev", "SD3.5", "Qwen-Image"]))
def test_every_image_family_on_one_rank(model: str) -> None:
    modes = ("balanced@bits=8", "fast@bits=1", "paper@warmup=4")
    [(record, _)] = ranks.run(evaluate_model, 1, model, torch.bfloat16, *modes)
    eight, one, exact = record["rows"]
    assert one["bytes_slow_fraction"] < eight["bytes_slow_fraction"] < 1
    assert 10 < one["psnr_db_mean"] < eight["psnr_db_mean"]
    assert exact["bit_equal"], "attention of the session differs from stock's"
