"""How records name the collectives of each axis, by what the layers of a run have done."""

from types import SimpleNamespace as Namespace

import pytest

from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.tools.comparison import axis_collectives
from xfuser_cocodiff.xdit.session.session import Session

MESH = Namespace(topology=Topology.parse("node=2,gpu=3,tile=1"))
ALONG_NODES = Namespace(slow_axis_names=("node",))


@pytest.mark.parametrize(
    ("gathered_layers", "along_nodes"),
    [(["a", "b"], "kv"), (["a"], "heads, kv"), ([], "heads")],
)
def test_lossy_runs_name_what_their_layers_did(gathered_layers: list[str], along_nodes: str) -> None:
    reports = [Namespace(errors={"a": 0.1, "b": 0.1}, gathered_layers=gathered_layers)]
    session = Namespace(mesh=MESH, gather=ALONG_NODES, runtime=Namespace(reports=reports))
    assert axis_collectives.of_run(session) == {"node": along_nodes, "gpu": "heads"}


@pytest.mark.parametrize(
    ("gathers", "along_nodes"),
    [([True, True], "kv"), ([True, False], "heads, kv"), ([False], "heads"), ([], "heads")],
)
def test_lossless_runs_name_what_their_schedules_say(gathers: list[bool], along_nodes: str) -> None:
    signatures = [Namespace(candidates=True, schedule=Namespace(gathers_kv=each)) for each in gathers]
    unknown = Namespace(candidates=None, schedule=Namespace(gathers_kv=True))
    layers = Namespace(signatures=[*signatures, unknown])
    session = Namespace(mesh=MESH, gather=ALONG_NODES, runtime=None, layers=layers)
    assert axis_collectives.of_run(session) == {"node": along_nodes, "gpu": "heads"}


def test_stock_names_no_collectives() -> None:
    assert axis_collectives.of_run(Session()) == {} and axis_collectives.slow_axes_of_run(Session()) == []
