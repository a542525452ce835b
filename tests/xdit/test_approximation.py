"""Lossy modes in whole pipelines: close to stock for fewer bytes, and no run depends on another."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import ranks
from tests.xdit.test_pipelines import MODELS, Run

pytestmark = pytest.mark.usefixtures("hub")

STEPS = 6
SIZE = ["--height", "128", "--width", "128", "--num_inference_steps", str(STEPS), "--seed", "3"]


class LossyRun(Run):
    """xDiT's runner, with latents as the plugin's run tracker receives them."""

    def __init__(self, rank: int, world_size: int, model: str, *more: str, dtype: torch.dtype = torch.float32) -> None:
        arguments = ["--model", model, "--ulysses_degree", str(world_size), *SIZE, *MODELS.get(model, ()), *more]
        super().__init__(rank, world_size, arguments, dtype)
        del self.runner.model.pipe.scheduler.__dict__["step"]
        from xfuser_cocodiff.xdit.integration import activation
        from xfuser_cocodiff.xdit.run_tracking.run_tracker import RunTracker

        activation.activate()
        end_step = RunTracker.end_step

        def record(tracker: Any, run: Any, latents: torch.Tensor) -> None:
            self.latents = latents
            end_step(tracker, run, latents)

        RunTracker.end_step = record

    @property
    def runtime(self) -> Any:
        from xfuser_cocodiff.xdit.session.session import active

        return active().runtime


def decibels(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the PSNR of latents in dB."""
    peak = expected.float().abs().max()
    return (20 * peak.log10() - 10 * (found.float() - expected.float()).square().mean().log10()).item()


def run_modes(rank: int, model: str) -> tuple[dict[str, tuple[float, float]], torch.Tensor]:
    """Return PSNR to stock and the fraction of bytes for each mode, and stock's latents."""
    run = LossyRun(rank, 4, model)
    stock = run()
    found = {}
    for name, mode, schedule in (
        ("8 bit", "balanced", "bits=8"),
        ("4 bit", "balanced", "bits=4"),
        ("2 bit", "balanced", "bits=2"),
        ("paper", "paper", None),
    ):
        run.use_mode(mode, schedule=schedule)
        latents = run()
        reports = run.runtime.reports
        assert [report.step for report in reports] == list(range(STEPS))
        assert run.runtime.store.nbytes == 0, "references outlive their run"
        sent = sum(report.sent_bytes for report in reports) / sum(report.exact_bytes for report in reports)
        found[name] = decibels(latents, stock), sent
        assert (reports[0].error == 0) == (mode == "paper") and reports[-1].error > 0
    run.use_mode("exact")
    assert run.runtime is None
    assert torch.equal(run(), stock)
    return found, stock


@pytest.mark.slow  # the tests of codecs are the quick ones
@pytest.mark.parametrize("model", ["FLUX.1-dev", "SD3.5"])
def test_more_bits_are_closer_to_stock(model: str) -> None:
    (first, stock), *others = ranks.run(run_modes, 4, model)
    for other, latents in others:  # in SD3.5 each rank has a part of the image, else all have the whole
        same = [other[name][0] == first[name][0] for name in first]
        assert all(same) or not torch.equal(latents, stock)
    quality, sent = ({name: pair[index] for name, pair in first.items()} for index in (0, 1))
    assert quality["8 bit"] > quality["4 bit"] > quality["2 bit"] > 10
    assert quality["4 bit"] > quality["paper"]
    assert sent["2 bit"] < sent["4 bit"] < sent["8 bit"] < sent["paper"] < 1


def run_with_step_cache(rank: int, model: str, method: str, config: dict) -> tuple[list[torch.Tensor], list[int]]:
    """Return latents of stock, exact and twice a lossy mode, all with a step cache, and the mode's bytes per step."""
    run = LossyRun(rank, 2, model, "--cache_method", method, "--cache_config", json.dumps(config))

    def fresh_run() -> torch.Tensor:
        for module in run.runner.model.pipe.transformer.modules():
            if type(module).__name__.endswith("CachedTransformerBlocks"):  # keeps state of the run before
                module.cache_context.modulated_inputs = None
                module.use_cache, module.cnt = torch.tensor(False), torch.tensor(0)
                module.accumulated_rel_l1_distance = torch.zeros(1)
        return run()

    latents = [fresh_run()]
    run.use_mode("exact", "node=2")
    latents.append(fresh_run())
    run.use_mode("balanced", "node=2", schedule="bits=8")
    latents += [fresh_run(), fresh_run()]
    return latents, [report.exact_bytes for report in run.runtime.reports]


DBCACHE = {"Fn_compute_blocks": 1, "max_warmup_steps": 1, "scm_policy": None, "residual_diff_threshold": 1.0}


@pytest.mark.slow  # steps without some layers are quick in session/test_schedule_tuner
@pytest.mark.parametrize(
    ("model", "method", "config"),
    [
        ("FLUX.1-dev", "teacache", {"residual_diff_threshold": 0.3}),
        ("SD3.5", "dbcache", DBCACHE),
    ],
)
def test_lossy_modes_work_with_step_caches(model: str, method: str, config: dict) -> None:
    for (stock, exact, first, second), sent in ranks.run(run_with_step_cache, 2, model, method, config):
        assert torch.equal(exact, stock)
        assert torch.equal(first, second), "a run depends on the one before"
        assert decibels(first, stock) > 40
        assert len(sent) == STEPS
        assert sent[0] == max(sent) > min(sent), "the cache skipped no layer, so this test shows nothing"


def transformer(name: str, **config: object) -> torch.nn.Module:
    """Return a transformer whose class has a name, in a wrapper."""
    base = type(name, (torch.nn.Module,), {"config": SimpleNamespace(**config)})
    return type("Wrapper", (base,), {})()


@pytest.mark.parametrize(
    ("name", "config", "image", "tokens", "expected"),
    [
        ("FluxTransformer2DModel", {}, (2, 40, 8), 72, [32, 40]),
        ("SD3Transformer2DModel", {"patch_size": 2}, (2, 16, 8, 20), 72, [40, 32]),
        ("CogVideoXTransformer3DModel", {"patch_size": 2, "patch_size_t": None}, (2, 5, 16, 8, 20), 232, [32, 200]),
        ("HunyuanVideoTransformer3DModel", {"patch_size": 2, "patch_size_t": 1}, (2, 16, 5, 8, 20), 232, [200, 32]),
    ],
)
def test_segments_of_text_and_image(name: str, config: dict, image: tuple, tokens: int, expected: list[int]) -> None:
    from xfuser_cocodiff.tools.comparison.segments import segments

    shapes = {"hidden_states": torch.Size(image), "encoder_hidden_states": torch.Size((2, 32, 64))}
    assert segments(transformer(name, **config), shapes, tokens) == expected
    assert segments(transformer(name, **config), {}, tokens) == [tokens]
