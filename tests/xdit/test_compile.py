"""`--use_torch_compile`: compiled, the plugin is compiled stock, in as many graphs. Traced, not generated but for one
test: that is Inductor's, and takes a while and a C++ compiler here."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

from tests import ranks
from tests.machine.test_planner import profile_of
from tests.quick import slow, slow_but
from tests.xdit.attention.test_overlap import start
from tests.xdit.test_pipelines import MODELS


def config_of(degree: int, plan: str | None, profile: bool = False, mode: str = "exact") -> object:
    """Settings, as flags would make them; without a plan the planner chooses."""
    from xfuser_cocodiff.machine.plan import Plan
    from xfuser_cocodiff.machine.topology import Topology
    from xfuser_cocodiff.settings.config import CocoDiffConfig

    topology = Topology.parse("2x2" if degree == 4 else "node=2", degree)
    sizes = list(topology.shape)
    known = profile_of(sizes, [1e8] * len(sizes), latency=1e-3, launch=1e-6) if profile else None
    slow = ("node",) if mode != "exact" else None
    fixed = plan and Plan.parse(plan, topology)
    return CocoDiffConfig(topology=topology, plan=fixed, profile=known, mode=mode, slow_axes=slow)


def compile_both(
    rank: int, configs: list[tuple], backend: str, dynamic: bool | None, record: str | None
) -> list[list[int]]:
    """Graphs and graph breaks of stock and of each plugin, whose results must be those of compiled stock."""
    from torch._dynamo.utils import counters

    from xfuser_cocodiff.xdit.engine import start as starting
    from xfuser_cocodiff.xdit.engine.engine import Engine, active
    from xfuser_cocodiff.xdit.launching import world

    if record:
        os.environ["COCODIFF_RECORD"] = record
    group, transformer, step = start(rank, depth=2)
    engines = [Engine(), *(starting.engine_over(group, config_of(*config)) for config in configs)]
    expected, figures = None, []
    for engine in engines:
        world.use(engine)
        torch._dynamo.reset()
        counters.clear()
        transformer.compile(backend=backend, dynamic=dynamic)
        results = [step(), step()]
        expected = results[0] if expected is None else expected
        for result in results:
            assert torch.equal(result, expected)
        assert not active().layers.kinds  # layers inside a graph are left alone
        figures.append([counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())])
        assert figures[-1][0] > 0
    return figures


def check(found: list[list[list[int]]]) -> None:
    for stock, *plugins in found:
        for plugin in plugins:
            assert plugin[0] <= stock[0] and plugin[1] <= stock[1], (stock, plugin)


AUTO, BY_PROFILE, BALANCED = (None,), (None, True), (None, False, "balanced")


@pytest.mark.parametrize(
    ("degree", "dynamic", "record", "configs"),
    [
        slow(4, None, True, [AUTO, BALANCED, ("hierarchical:gpu*,node",)]),
        slow(4, True, False, [AUTO, BY_PROFILE, ("hierarchical:node,gpu/2",)]),
        slow(2, None, False, [BY_PROFILE, ("flat*",)]),
        slow(2, True, True, [AUTO, BALANCED, ("flat",)]),
    ],
)
def test_compiled_it_has_stocks_bits_and_no_more_graphs_and_breaks(
    degree: int, dynamic: bool | None, record: bool, configs: list[tuple]
) -> None:
    """By the planner, by a profile, by fixed plans, and in a mode that approximates."""
    with tempfile.TemporaryDirectory() as folder:
        configs = [(degree, *config) for config in configs]
        check(ranks.run(compile_both, degree, configs, "aot_eager", dynamic, folder if record else None))


@pytest.mark.slow  # traced, the same is tested above and, of a pipeline, below
@pytest.mark.skipif(not shutil.which("g++"), reason="Inductor needs a C++ compiler")
def test_what_inductor_makes_of_it_has_stocks_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    check(ranks.run(compile_both, 2, [(2, None)], "inductor", None, None))


def compile_a_pipeline(rank: int, model: str) -> list[list[int]]:
    """As :func:`compile_both`, of a whole pipeline by xDiT's runner."""
    from torch._dynamo.utils import counters

    from tests.xdit.test_approximation import Approximating

    run = Approximating(rank, 2, model, "--num_inference_steps", "2")
    expected, figures = None, []
    for mode in (None, "exact", "balanced"):
        if mode:
            run.by(mode, "node=2")
        torch._dynamo.reset()
        counters.clear()
        run.runner.model.pipe.transformer.compile(backend="aot_eager")
        latents = run()
        expected = latents if expected is None else expected
        assert torch.equal(latents, expected), mode
        figures.append([counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())])
        assert figures[-1][0] > 0
    return figures


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("model", slow_but(["FLUX.1-dev"], MODELS))
def test_compiled_pipelines_have_stocks_bits_and_no_more_graphs_and_breaks(model: str) -> None:
    check(ranks.run(compile_a_pipeline, 2, model))


def compile_late(rank: int) -> None:
    """Layers that were learned before their transformer was compiled do not stand in the way."""
    from xfuser_cocodiff.exchange.mesh import Mesh
    from xfuser_cocodiff.machine.plan import Plan
    from xfuser_cocodiff.machine.topology import Topology
    from xfuser_cocodiff.settings.config import Overlap
    from xfuser_cocodiff.xdit.engine.engine import Engine
    from xfuser_cocodiff.xdit.launching import world

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
