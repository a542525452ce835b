"""`cocodiff quality`: codecs on the small trained model, and the command line."""

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from small_models import hub
from tests import ranks
from tests.quick import slow_but
from xfuser_cocodiff.cli import quality as quality_command
from xfuser_cocodiff.engine.compression.modes import PRESETS
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.tools.comparison import quality
from xfuser_cocodiff.xdit.session.session import active
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig

CONFIG = CocoDiffConfig(topology=Topology.flat(1), virtual=Topology.parse("2x2"), slow_axes=("node",))


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
