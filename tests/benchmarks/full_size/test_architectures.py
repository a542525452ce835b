"""The arguments of the transformers equal the defaults of diffusers, which are those of the real weights."""

import inspect

import diffusers
import pytest

from benchmarks.full_size.architectures import ARCHITECTURES
from xfuser_cocodiff.lab.simulation.workloads import WORKLOADS

CLASSES = {
    "flux.1-dev": "FluxTransformer2DModel",
    "flux.2-dev": "Flux2Transformer2DModel",
    "qwen-image": "QwenImageTransformer2DModel",
    "hunyuanvideo": "HunyuanVideoTransformer3DModel",
    "wan2.1-14b": "WanTransformer3DModel",
}
"""All but SD3.5, whose class has the defaults of an earlier model."""
DIFFERENT = {("flux.1-dev", "guidance_embeds")}
"""FLUX.1-dev has distilled guidance; the default is FLUX.1-schnell's."""


@pytest.mark.parametrize("name", CLASSES)
def test_arguments_are_the_defaults(name: str) -> None:
    parameters = inspect.signature(getattr(diffusers, CLASSES[name]).__init__).parameters
    defaults = {key: parameter.default for key, parameter in parameters.items()}
    sizes = ARCHITECTURES[name].sizes(WORKLOADS[name], blocks=1000)
    expected = {key: value for key, value in sizes.items() if (name, key) not in DIFFERENT}
    assert expected == {key: defaults[key] for key in expected}


def test_every_workload_has_an_architecture() -> None:
    assert ARCHITECTURES.keys() == WORKLOADS.keys()
