"""Whole pipelines beside those of the paper, videos and pictures from pictures, in xDiT's runner at degree 2."""

import os
from pathlib import Path

import pytest
import torch

from tests import ranks
from tests.quick import slow_but
from tests.xdit.test_pipelines import Run, moved
from xfuser_cocodiff.models import hub

HOME = Path(os.environ["HF_HOME"])
SIZE = ["--height", "128", "--width", "128"]
EDITED = ["--height", "256", "--width", "256", "--input_images", str(HOME / hub.INPUT_IMAGE)]
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
}


def compare(rank: int, arguments: list[str]) -> None:
    run = Run(rank, 2, arguments)
    pipe, ran = run.runner.model.pipe, set()
    experts = [pipe.transformer] + ([pipe.transformer_2] if "Wan2.2-T2V" in arguments else [])
    for expert in experts:
        expert.register_forward_pre_hook(lambda expert, _: ran.add(expert))
    stock = run()
    assert ran == {*experts}
    assert torch.isfinite(stock).all()
    assert moved() == set()
    assert not torch.equal(run(prompt="a slice of blood vessels"), stock)
    run.use("2x1")
    assert torch.equal(run(), stock)
    assert moved() == {"node"}


@pytest.mark.parametrize("model", slow_but(["Wan2.2-T2V"], MODELS))
def test_latents_equal_stock(model: str) -> None:
    hub.write_cache(HOME, [model])
    arguments = ["--model", model, "--prompt", "a photo of a cat", "--num_inference_steps", "3", "--seed", "3"]
    ranks.run(compare, 2, [*arguments, "--ulysses_degree", "2", *MODELS[model]])
