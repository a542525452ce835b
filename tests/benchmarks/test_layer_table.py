"""The table of layers that `cocodiff plan` reads is what the recorder records."""

import json

import pytest

from benchmarks import layer_table
from tests.quick import slow_but
from xfuser_cocodiff.tools.simulation.layers import LAYERS_FILE
from xfuser_cocodiff.tools.simulation.workloads import WORKLOADS


def test_every_kind_of_layer_is_in_the_file() -> None:
    kinds = {name: [kind.name for kind in workload.kinds] for name, workload in WORKLOADS.items()}
    assert {name: [*layers] for name, layers in json.loads(LAYERS_FILE.read_text()).items()} == kinds


@pytest.mark.parametrize("name", slow_but(["flux.1-dev"], WORKLOADS))
def test_layers_in_the_file_are_the_recorded_ones(name: str) -> None:
    recorded = json.loads(layer_table.to_text(layer_table.table([name])))
    assert recorded[name] == json.loads(LAYERS_FILE.read_text())[name], "python -m benchmarks.layer_table updates it"
