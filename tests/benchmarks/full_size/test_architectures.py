"""The arguments of the transformers, where they differ from the defaults of diffusers."""

from benchmarks.full_size.architectures import ARCHITECTURES
from benchmarks.full_size.inputs import INPUTS
from xfuser_cocodiff.tools.simulation.workloads import WORKLOADS


def test_every_workload_has_an_architecture_and_inputs() -> None:
    """Parameters and shapes of the real models are tested in test_transformer."""
    assert ARCHITECTURES.keys() == INPUTS.keys() == WORKLOADS.keys()
