"""`--use_torch_compile`: results are bit-identical to compiled stock, without more graphs or graph breaks.

Graphs are traced. Only one test generates code with Inductor, which needs a C++ compiler and more time.
"""

import dataclasses
import re
import shutil
from pathlib import Path

import pytest
import torch

from benchmarks import bare_runtime
from tests import ranks
from tests.engine.topology.test_planner import profile_of
from tests.quick import slow
from tests.xdit.attention.test_overlap import start, use_config
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.tools.comparison.stage_timer import StageTimer
from xfuser_cocodiff.xdit.session import startup as starting
from xfuser_cocodiff.xdit.session.session import Session, active
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig, Overlap


def config_of(degree: int, plan: str | None, profile: bool = False, mode: str = "exact") -> CocoDiffConfig:
    """Return the config that flags would give; without a plan the planner chooses one."""
    topology = Topology.parse("2x2" if degree == 4 else "node=2", degree)
    sizes = list(topology.shape)
    known = profile_of(sizes, [1e8] * len(sizes), latency=1e-3, launch=1e-6) if profile else None
    slow = ("node",) if mode != "exact" else ()
    fixed = plan and Plan.parse(plan, topology)
    return CocoDiffConfig(topology=topology, plan=fixed, profile=known, mode=mode, slow_axes=slow)


def compile_both(rank: int, configs: list[tuple], dynamic: bool | None, record: bool) -> list[list[int]]:
    """Return the number of graphs and of graph breaks of stock and of each config, and compare their results."""
    from torch._dynamo.utils import counters

    group, transformer, step = start(rank, depth=2)
    sessions = [Session(), *(starting.create_session(group, config_of(*config)) for config in configs)]
    expected, figures = None, []
    for session in sessions:
        bare_runtime.use_session(session)
        session.traffic.timer = StageTimer() if record else None  # as the recorder sets it
        torch._dynamo.reset()
        counters.clear()
        transformer.compile(backend="aot_eager", dynamic=dynamic)
        results = [step() for _ in range(3)]
        expected = results[0] if expected is None else expected
        for result in results:
            assert torch.equal(result, expected)
        assert (active().runtime is not None) == bool(active().traffic.calls)  # counted by the operators
        figures.append([counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())])
        assert figures[-1][0] > 0
    return figures


def check(found: list[list[list[int]]]) -> None:
    """Check that no config has more graphs or graph breaks than stock."""
    for stock, *plugins in found:
        for plugin in plugins:
            assert all(ours <= theirs for ours, theirs in zip(plugin, stock, strict=True)), (stock, plugin)


AUTO, BY_PROFILE, BALANCED = (None,), (None, True), (None, False, "balanced")


@pytest.mark.parametrize(
    ("degree", "dynamic", "record", "configs"),
    [
        (2, None, False, [BALANCED]),
        slow(4, None, True, [AUTO, BALANCED]),
        slow(2, True, False, [BY_PROFILE, ("hierarchical:node=kv",)]),
    ],
)
def test_compiled_transformer_equals_stock_without_more_graphs(
    degree: int, dynamic: bool | None, record: bool, configs: list[tuple]
) -> None:
    """With plans of the planner, by a profile, with fixed plans, and in a lossy mode. Graphs are traced before a check
    could compare bits, so that a plan which gathers K and V keeps heads."""
    configs = [(degree, *config) for config in configs]
    check(ranks.run(compile_both, degree, configs, dynamic, record))


def trace_as_for_devices(rank: int) -> None:
    """Check the traced collectives of a lossless run, as on accelerators."""
    group, transformer, step = start(rank, depth=2)
    expected = step()
    use_config(group, dataclasses.replace(config_of(2, "flat"), overlap=Overlap(True)))
    graphs: list[str] = []

    def compiled(graph: torch.fx.GraphModule, _: list) -> torch.fx.GraphModule:
        graphs.append(graph.code)
        return graph

    transformer.compile(backend=compiled)
    assert torch.equal(step(), expected)
    sent = sum(code.count("all_to_all_single(") for code in graphs)
    assert sent == 6  # V, then Q and K, and O in two layers
    assert not any("cocodiff" in code for code in graphs)


def test_lossless_graphs_of_accelerators_have_traced_collectives() -> None:
    ranks.run(trace_as_for_devices, 2)


def test_the_custom_operator_is_excluded_from_cuda_graphs() -> None:
    from xfuser_cocodiff.xdit.attention import custom_ops

    assert custom_ops and torch.Tag.cudagraph_unsafe in torch.ops.cocodiff.attention.default.tags


def order_of_two_layers(rank: int) -> None:
    """Check that a graph keeps two independent layers in order, as those of video and audio."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    group, *_ = start(rank, depth=2)
    use_config(group, config_of(2, "flat", mode="balanced"))
    from xfuser.model_executor.layers.usp import USP  # which is patched by now

    graphs: list[torch.fx.Graph] = []
    mask = torch.ones(1, 1, 1, 6, dtype=torch.bool)

    def keep(module: torch.fx.GraphModule, _: list) -> object:
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    @torch.compile(backend=aot_autograd(fw_compiler=keep), fullgraph=True)
    def both(picture: torch.Tensor, sound: torch.Tensor) -> list[torch.Tensor]:
        masked = {"valid_kv_len": 6, "attn_mask": mask, "name": "of a backend"}
        return [USP(picture, picture, picture), USP(sound, sound, sound, attention_kwargs=masked)]

    with torch.inference_mode():
        given = [torch.full((1, 4, 8, 4), float(each)) for each in (1, 2)]
        assert all(torch.equal(result, each) for result, each in zip(both(*given), given, strict=True))
    first, second = [node for node in graphs[0].nodes if "cocodiff" in f"{node.target} {node.args[1:2]}"]
    needed, found = [second], {second}
    while needed:
        more = set(needed.pop().all_input_nodes) - found
        found |= more
        needed += more
    assert first in found, f"{second} may run before {first}"


def test_attention_of_independent_layers_keeps_its_order() -> None:
    ranks.run(order_of_two_layers, 2)


EVENTS = {
    r"all_to_all_single\.default\(": "s",
    r"wait_tensor\.default\(": "w",
    r"extern_kernels\.\w*mm\(": "m",
    r"_scaled_dot_product\w+\.default\(": "a",
}
"""Patterns of events in Inductor's code: sends, waits, matrix products and attention."""


def generate(rank: int) -> tuple[str, str]:
    """Return the events of a step of stock and of mode exact, in a model with a double block and two single blocks,
    where Inductor has other passes set, as by xDiT's runner."""
    from torch._inductor import config as inductor
    from torch._inductor.utils import run_and_get_code
    from xfuser.model_executor.models.runner_models.base_model import xFuserModel

    group, transformer, step = start(rank, depth=3)
    config = dataclasses.replace(config_of(2, None), overlap=Overlap(True))
    results, events = [], []
    for make in (Session, lambda: starting.create_session(group, config)):
        bare_runtime.use_session(make())
        xFuserModel._enable_compute_comm_overlap(None)
        torch._dynamo.reset()
        transformer.compile()
        result, code = run_and_get_code(step)
        results += [result, step(), step()]
        found = re.finditer("|".join(f"({event})" for event in EVENTS), code[-1])
        events.append("".join(list(EVENTS.values())[event.lastindex - 1] for event in found))
    assert all(torch.equal(result, results[0]) for result in results)
    assert len(inductor.reorder_for_compute_comm_overlap_passes) == 3
    return tuple(events)


@pytest.mark.slow  # it generates code
@pytest.mark.skipif(not shutil.which("g++"), reason="Inductor needs a C++ compiler")
def test_v_is_sent_before_q_and_k_are_projected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    both = ranks.run(generate, 2)
    assert both[0] == both[1]  # or ranks would call different collectives
    stock, exact = both[0]
    assert len(re.findall("sw*a", stock)) == 3  # Q, K and V together
    assert re.fullmatch("(m+sm+sm*w+am*sm*w){3}m+w", exact)  # V, then Q and K, and O
