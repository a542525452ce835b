"""More pipelines in xDiT's runner at degree 2: videos, and pictures edited or continued from pictures."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models import hub
from tests import ranks
from tests.small_pipelines import wan
from tests.xdit.families import FAMILIES
from tests.xdit.test_pipelines import Run, used_axes

HOME = Path(os.environ["HF_HOME"])
PROMPT, STEPS = "a photo of a cat", 3
SIZE = ["--height", "128", "--width", "128"]
PICTURE = str(HOME / hub.INPUT_IMAGE)
EDITED = ["--height", "256", "--width", "256", "--input_images", PICTURE]
VIDEO = [*SIZE, "--num_frames", "9"]
GUIDED = ["--negative_prompt", "old coins"]
MODELS = {
    "FLUX.1-Kontext-dev": [*EDITED, "--max_sequence_length", "32"],
    "Qwen-Image-Edit": [*EDITED, *GUIDED],
    "FLUX.2-klein-4B": SIZE,
    "Lumina2": [*SIZE, *GUIDED],
    "Wan2.1-T2V": [*VIDEO, *GUIDED],
    "Wan2.2-T2V": [*VIDEO, *GUIDED],
    "Hunyuanvideo-1.5": [*VIDEO, "--task", "t2v"],
    "Wan2.1-I2V": [*VIDEO, *GUIDED, "--input_images", PICTURE],
    "Wan2.2-I2V": [*VIDEO, *GUIDED, "--input_images", PICTURE],
    "Wan2.2-TI2V": [*VIDEO, *GUIDED, "--task", "i2v", "--input_images", PICTURE],
    "Wan2.1-VACE-1.3B": [*VIDEO, *GUIDED, "--input_images", PICTURE, PICTURE],
}


def saved(build: Callable, **options: Any) -> Callable[[Path], None]:
    """Return a function that saves a pipeline to a folder."""
    return lambda folder: build(**options).save_pretrained(folder)


ONLY_IN_TESTS = {
    "Wan2.1-I2V": ("Wan-AI/Wan2.1-I2V-14B-720P-Diffusers", saved(wan.image_to_video, has_encoder=True)),
    "Wan2.2-I2V": ("Wan-AI/Wan2.2-I2V-A14B-Diffusers", saved(wan.image_to_video, experts=2)),
    "Wan2.2-TI2V": ("Wan-AI/Wan2.2-TI2V-5B-Diffusers", saved(wan.image_to_video, expands=True)),
    "Wan2.1-VACE-1.3B": ("Wan-AI/Wan2.1-VACE-1.3B-diffusers", saved(wan.vace)),
}
"""Repositories of models that only tests have, and functions that save them."""


def compare(rank: int, arguments: list[str]) -> None:
    run = Run(rank, 2, arguments)
    run.inputs["prompt"] = PROMPT  # the runner passes a list, which Wan VACE's pipeline rejects
    pipe, called = run.runner.model.pipe, set()
    experts = [pipe.transformer] + ([pipe.transformer_2] if getattr(pipe, "transformer_2", None) else [])
    for expert in experts:
        expert.register_forward_pre_hook(lambda expert, _: called.add(expert))
    stock = run()
    assert called == {*experts}
    assert torch.isfinite(stock).all()
    assert used_axes() == set()
    assert not torch.equal(run(prompt="a slice of blood vessels"), stock)
    run.use_plugin("2x1")
    assert torch.equal(run(), stock)
    assert used_axes() == {"node"}
    assert v_first_of(arguments[1])
    check_coded(run, keyframes=len(experts))


def v_first_of(name: str) -> bool:
    """Return whether V goes first in every layer, and check its sources against the table of families."""
    from xfuser_cocodiff.xdit.session.session import active

    known = [signature for signature in active().layers.signatures if signature.candidates]
    [family] = (family for family in FAMILIES if name in family.names)
    assert {path for signature in known for path in signature.structure.recipe.paths} <= {*family.v_first}
    return bool(known) and all(signature.ready for signature in known)


def check_coded(run: Run, keyframes: int) -> None:
    """Check that all steps are encoded, keyframes in 8 bits."""
    from xfuser_cocodiff.xdit.session.session import active

    del run.runner.model.pipe.scheduler.__dict__["step"]  # a step of the instance would hide the patched one
    run.use_mode("balanced", "2x1", schedule="bits=4")
    run()
    reports = active().runtime.reports
    bits = [32 * report.sent_bytes / report.exact_bytes for report in reports]
    assert len(bits) == STEPS
    assert all(report.error > 0 for report in reports)
    assert (sum(4 < each < 6.4 for each in bits), sum(8 < each < 9.6 for each in bits)) == (
        STEPS - keyframes,
        keyframes,
    )


@pytest.mark.slow  # test_transformers has their transformers, and test_pipelines other pipelines
@pytest.mark.parametrize("model", MODELS)
def test_latents_equal_stock(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if model in ONLY_IN_TESTS:
        monkeypatch.setitem(hub.REGISTRY, model, hub.SmallModel(*ONLY_IN_TESTS[model], takes_image=True))
    hub.write_cache(HOME, [model])
    arguments = ["--model", model, "--prompt", PROMPT, "--num_inference_steps", str(STEPS), "--seed", "3"]
    ranks.run(compare, 2, [*arguments, "--ulysses_degree", "2", *MODELS[model]])
