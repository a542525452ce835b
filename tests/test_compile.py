"""`--use_torch_compile`: compiled, the plugin is compiled stock, in as many graphs. Traced, not generated: that is
Inductor's, which would take minutes and a C++ compiler here."""

import torch

from tests import ranks
from tests.test_overlap import start


def compile_both(rank: int) -> list[int]:
    """Graph breaks of stock and of the plugin, whose results must be equal."""
    from torch._dynamo.utils import counters

    from xfuser_cocodiff.collectives import Mesh
    from xfuser_cocodiff.plan import Plan
    from xfuser_cocodiff.topology import Topology
    from xfuser_cocodiff.xdit import world
    from xfuser_cocodiff.xdit.engine import Engine, active

    group, transformer, step = start(rank, depth=3)
    topology = Topology.parse("2x2", 4)
    mesh = Mesh.over(group, topology, [Plan.parse("hierarchical", topology)])
    results, breaks = [step()], []
    for side in (None, mesh):
        world.use(Engine(mesh=side))
        torch._dynamo.reset()
        counters.clear()
        transformer.compile(backend="aot_eager")
        results += [step(), step()]
        breaks.append(sum(counters["graph_break"].values()))
        assert counters["stats"]["unique_graphs"] > 0
    assert active().layers.kinds == []  # layers inside a graph are left alone
    for result in results[1:]:
        assert torch.equal(result, results[0])
    return breaks


def test_a_compiled_transformer_has_stocks_bits_and_no_more_graph_breaks() -> None:
    for stock, plugin in ranks.run(compile_both, 4):
        assert plugin <= stock


def compile_late(rank: int) -> None:
    """Layers that were learned before their transformer was compiled do not stand in the way."""
    from xfuser_cocodiff.collectives import Mesh
    from xfuser_cocodiff.config import Overlap
    from xfuser_cocodiff.plan import Plan
    from xfuser_cocodiff.topology import Topology
    from xfuser_cocodiff.xdit import world
    from xfuser_cocodiff.xdit.engine import Engine

    group, transformer, step = start(rank, depth=3)
    topology = Topology.flat(2)
    world.use(Engine(mesh=Mesh.over(group, topology, [Plan.flat(topology)]), overlap=Overlap(True, 2)))
    results = [step() for _ in range(4)]
    transformer.compile(backend="aot_eager")
    results += [step() for _ in range(2)]
    for result in results[1:]:
        assert torch.equal(result, results[0])


def test_a_transformer_may_be_compiled_after_it_was_followed() -> None:
    ranks.run(compile_late, 2)
