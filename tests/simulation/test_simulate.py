"""The simulator, against bytes and FLOPs taken by hand or from PyTorch, and against laws that any machine obeys."""

import dataclasses
import inspect
import io
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from xfuser_cocodiff.machine import planner
from xfuser_cocodiff.machine.plan import Plan, candidates
from xfuser_cocodiff.simulation import layer, paper, simulate_report
from xfuser_cocodiff.simulation.machines import AURORA, MACHINES, PCIE, Machine
from xfuser_cocodiff.simulation.scenario import MODES, STOCK, Mode, Scenario
from xfuser_cocodiff.simulation.simulate import simulate, sweep
from xfuser_cocodiff.simulation.timeline import Task, finish, makespan
from xfuser_cocodiff.simulation.workloads import WORKLOADS, Workload

TINY = Workload("tiny", layers=3, heads=8, head_dim=16, mlp_ratio=4, gated=False, text_tokens=32)
QWEN = WORKLOADS["qwen-image"]

scenarios = st.builds(
    Scenario,
    machine=st.sampled_from(list(MACHINES.values())),
    nodes=st.sampled_from([1, 2, 4, 6, 8]),
    workload=st.sampled_from(list(WORKLOADS.values())),
    resolution=st.sampled_from([256, 768, 1536, 2304]),
    batch=st.sampled_from([1, 4, 32]),
)
modes = st.sampled_from(list(MODES.values()))
few = settings(deadline=None, max_examples=40)


def boundless(machine: Machine) -> Machine:
    """The machine with links and collectives that take no time."""
    links = tuple(dataclasses.replace(link, latency_seconds=0.0, bytes_per_second=math.inf) for link in machine.links)
    return dataclasses.replace(machine, links=links, launch_seconds=0.0, copy_bytes_per_second=math.inf)


def faster(machine: Machine, times: float) -> Machine:
    """The machine with everything so many times faster."""
    links = tuple(
        dataclasses.replace(
            link,
            latency_seconds=link.latency_seconds / times,
            bytes_per_second=link.bytes_per_second * times,
        )
        for link in machine.links
    )
    return dataclasses.replace(
        machine,
        links=links,
        launch_seconds=machine.launch_seconds / times,
        copy_bytes_per_second=machine.copy_bytes_per_second * times,
        peak_flops=machine.peak_flops * times,
    )


# Bytes and FLOPs.


def test_bytes_by_hand() -> None:
    # 64 px are 4 x 4 tokens; with 32 of text 48, on 4 ranks 12 each, of 8 heads x 16 x 2 bytes.
    assert TINY.message_bytes(64, batch=1, ranks=4) == 12 * 8 * 16 * 2
    assert TINY.message_bytes(64, batch=3, ranks=5) == 3 * 10 * 8 * 16 * 2, "tokens are padded to divide"
    # 144 x 144 tokens and 128 of text, over 12 tiles, 24 heads of 128.
    assert QWEN.message_bytes(2304, 1, 12) == math.ceil((144**2 + 128) / 12) * 24 * 128 * 2
    sd35 = WORKLOADS["sd3.5-large"]
    assert sd35.message_bytes(768, 1, 12) == 2 * math.ceil((48**2 + 333) / 12) * 48 * 64 * 2, "guidance, padded heads"


def test_flops_by_hand() -> None:
    tokens, width = 48, 128
    projections = 4 * width**2 + 2 * width * 4 * width
    attention = 2 * tokens**2 * width  # multiply-adds of scores, and of scores with V
    assert TINY.step_flops(64, batch=2) == 2 * 3 * 2 * (tokens * projections + attention)


def tiny_transformer(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor], Workload]:
    """A small model of diffusers, inputs for 16 x 16 image tokens, and what the simulator takes it for."""
    from diffusers import models

    image, text, heads, dim = 256, 32, 4, 16
    size = {"num_attention_heads": heads, "attention_head_dim": dim, "num_layers": 2}
    rope, wide = (4, 6, 6), 8
    ids = {"img_ids": torch.zeros(image, 3), "txt_ids": torch.zeros(text, 3)}
    states = {"hidden_states": torch.zeros(1, image, wide), "encoder_hidden_states": torch.zeros(1, text, wide)}
    half = torch.tensor([0.5])
    work = Workload(name, 5, heads, dim, mlp_ratio=4, gated=False, text_tokens=text)
    if name == "flux.1-dev":
        model = models.FluxTransformer2DModel(
            in_channels=wide, num_single_layers=3, joint_attention_dim=wide, pooled_projection_dim=8,
            axes_dims_rope=rope, **size
        )  # fmt: skip
        return model, {**states, **ids, "pooled_projections": torch.zeros(1, 8), "timestep": half}, work
    if name == "flux.2-dev":
        model = models.Flux2Transformer2DModel(
            in_channels=wide, num_single_layers=3, joint_attention_dim=wide, timestep_guidance_channels=8,
            axes_dims_rope=(4, 4, 4, 4), **size
        )  # fmt: skip
        ids = {"img_ids": torch.zeros(image, 4), "txt_ids": torch.zeros(text, 4)}
        work = dataclasses.replace(work, mlp_ratio=3, gated=True)
        return model, {**states, **ids, "timestep": half, "guidance": half}, work
    if name == "qwen-image":
        model = models.QwenImageTransformer2DModel(
            in_channels=wide, out_channels=2, joint_attention_dim=wide, axes_dims_rope=rope, **size
        )
        mask = torch.ones(1, text, dtype=torch.bool)
        inputs = {"encoder_hidden_states_mask": mask, "timestep": half, "img_shapes": [[(1, 16, 16)]]}
        return model, {**states, **inputs}, dataclasses.replace(work, layers=2)
    model = models.SD3Transformer2DModel(
        sample_size=32, in_channels=2, out_channels=2, joint_attention_dim=wide, caption_projection_dim=heads * dim,
        pooled_projection_dim=8, pos_embed_max_size=32, **(size | {"num_layers": 6})
    )  # fmt: skip
    inputs = {"pooled_projections": torch.zeros(1, 8), "timestep": half}
    return model, states | {"hidden_states": torch.zeros(1, 2, 32, 32), **inputs}, dataclasses.replace(work, layers=6)


@pytest.mark.parametrize("name", WORKLOADS)
def test_flops_are_those_of_diffusers(name: str) -> None:
    """PyTorch's counter sees embeddings and modulation too, and at this size they are some percent."""
    model, inputs, work = tiny_transformer(name)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # the counter does not know the CPU's fused kernel
        model(**inputs, return_dict=False)
    assert work.step_flops(256, batch=1) == pytest.approx(counter.get_total_flops(), rel=0.04)


@pytest.mark.parametrize(
    ("name", "transformer"),
    [
        ("flux.1-dev", "FluxTransformer2DModel"),
        ("flux.2-dev", "Flux2Transformer2DModel"),
        ("qwen-image", "QwenImageTransformer2DModel"),
    ],
)
def test_dimensions_are_the_defaults_of_diffusers(name: str, transformer: str) -> None:
    from diffusers import models

    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(getattr(models, transformer).__init__).parameters.items()
    }
    work = WORKLOADS[name]
    assert work.layers == defaults["num_layers"] + defaults.get("num_single_layers", 0)
    assert (work.heads, work.head_dim) == (defaults["num_attention_heads"], defaults["attention_head_dim"])


# The timeline.


def test_tasks_wait_for_their_resource_and_for_each_other() -> None:
    tasks = [
        Task("a", "x", 1.0),
        Task("b", "y", 5.0, ("a",)),
        Task("c", "x", 2.0),
        Task("d", "x", 1.0, ("b",)),
    ]
    assert finish(tasks) == {"a": 1.0, "b": 6.0, "c": 3.0, "d": 7.0}
    assert makespan([]) == 0.0
    with pytest.raises(KeyError):
        finish([Task("a", "x", 1.0, ("b",)), Task("b", "x", 1.0)])


def test_v_hides_behind_q_and_k_only() -> None:
    """By hand: what V-First saves is the shorter of V's exchange and two projections, in every layer of every call."""
    for machine in (AURORA, PCIE):
        scenario = Scenario(machine, 1, QWEN, 1536)
        projection = scenario.compute_seconds(QWEN.linear_flops(1536, 1))
        exchange = layer.exchange_seconds(scenario, Plan.hierarchical(scenario.profile.topology))
        saved = layer.step(scenario, MODES["tapa"]).step - layer.step(scenario, MODES["tapa+vfirst"]).step
        assert saved == pytest.approx(2 * 60 * min(2 * projection, exchange))


def test_a_head_group_attends_while_the_next_comes_in_and_the_one_before_goes_back() -> None:
    known = {"projection": 0.0, "mlp_projections": 0.0, "attention": 6.0, "exchanges": dict.fromkeys("vqko", 4.0)}
    once, twice = (makespan(layer.layer_tasks(**known, v_first=False, head_groups=groups)) for groups in (1, 2))
    assert once == 12 + 6 + 4
    assert twice == 6 + 6 + 3 + 2  # half of Q, K and V, the other half, the second half of attention, that of O


def test_a_machine_without_overlap_hides_nothing() -> None:
    blocking = dataclasses.replace(AURORA, overlaps=False)
    row = simulate(blocking, 4, QWEN, 1536, mode="exact+vfirst")
    assert row.hidden_seconds == pytest.approx(0, abs=1e-12)
    assert row.step_seconds == pytest.approx(row.compute_seconds + row.a2a_seconds + row.ring_seconds)


# Laws.


@given(scenario=scenarios, mode=modes)
@few
def test_a_step_lies_between_its_longest_part_and_their_sum(scenario: Scenario, mode: Mode) -> None:
    found = layer.step(scenario, mode)
    moved = found.a2a + found.ring
    assert max(found.compute, moved) <= found.step * (1 + 1e-9)
    assert found.step <= (found.compute + moved) * (1 + 1e-9)
    assert 0 <= found.hidden <= min(found.compute, moved) * (1 + 1e-9)


@given(scenario=scenarios)
@few
def test_stock_is_not_faster_than_itself_nor_than_the_best_plan(scenario: Scenario) -> None:
    stock, exact, v_first = (layer.step(scenario, MODES[name]).step for name in (STOCK, "exact", "exact+vfirst"))
    assert v_first <= exact * (1 + 1e-9)
    assert exact <= stock * (1 + 1e-9)


@given(scenario=scenarios, mode=modes)
@few
def test_without_communication_a_step_is_its_compute(scenario: Scenario, mode: Mode) -> None:
    found = layer.step(dataclasses.replace(scenario, machine=boundless(scenario.machine)), mode)
    flops = scenario.workload.step_flops(scenario.resolution, scenario.batch)
    assert found.step == pytest.approx(flops / scenario.ranks / scenario.machine.flops)
    assert found.a2a == found.ring == 0


@given(scenario=scenarios, mode=modes, times=st.sampled_from([0.01, 3.0, 1000.0]))
@few
def test_speedups_stay_when_everything_is_scaled(scenario: Scenario, mode: Mode, times: float) -> None:
    scaled = dataclasses.replace(scenario, machine=faster(scenario.machine, times))
    assert layer.step(scenario, mode).step == pytest.approx(times * layer.step(scaled, mode).step)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_every_plan_sends_the_same_bytes_between_nodes(machine: Machine) -> None:
    """With all other links free, only what crosses nodes takes time: P - P/n parts of P of a message."""
    nodes, message = 4, 48e6
    free = boundless(dataclasses.replace(machine, contention=((1.0, 1.0),), contention_across_nodes=1.0))
    speed = next(link.bytes_per_second for link in machine.links if link.name == "node")
    links = tuple(
        dataclasses.replace(link, bytes_per_second=speed) if link.name == "node" else link for link in free.links
    )
    profile = dataclasses.replace(free, links=links).profile(nodes, message)
    for plan in candidates(profile.topology):
        wires = [planner.stage_cost(profile, stage, message).wire for stage in plan.stages]
        assert sum(wires) == pytest.approx(message * (nodes - 1) / nodes / speed)


def test_more_nodes_never_send_fewer_slow_bytes() -> None:
    """All ranks together, over the links between nodes: S/P tokens a rank, (n - 1)/n of them leave the node."""
    sent = []
    for nodes in (1, 2, 4):
        scenario = Scenario(AURORA, nodes, WORKLOADS["flux.2-dev"], 2304)
        assert scenario.ring_degree == 1
        sent.append(scenario.ranks * scenario.message_bytes * (nodes - 1) / nodes)
    assert sent == sorted(sent)
    assert sent[0] == 0


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_share_scales_slow_bytes_only(share: float) -> None:
    scenario = Scenario(AURORA, 2, QWEN, 2304)
    assert scenario.profile.slow_axes == ("node", "gpu")
    plan = Plan.hierarchical(scenario.profile.topology)
    wires = [planner.stage_cost(scenario.profile, stage, scenario.message_bytes).wire for stage in plan.stages]
    saved = layer.exchange_seconds(scenario, plan) - layer.exchange_seconds(scenario, plan, share)
    assert saved == pytest.approx((1 - share) * sum(wires[1:])), "tiles come first and are fast"


# Groups and machines.


@pytest.mark.parametrize(
    ("cluster", "nodes", "model", "degree", "ring"),
    [
        ("aurora", 2, "qwen-image", 24, 1),
        ("aurora", 3, "qwen-image", 12, 3),
        ("aurora", 8, "qwen-image", 24, 4),
        ("aurora", 8, "flux.2-dev", 48, 2),
        ("aurora", 4, "sd3.5-large", 48, 1),
        ("dgx-h100", 2, "flux.1-dev", 8, 2),
        ("dgx-h100", 2, "flux.2-dev", 16, 1),
    ],
)
def test_heads_bound_the_ulysses_degree(cluster: str, nodes: int, model: str, degree: int, ring: int) -> None:
    row = simulate(MACHINES[cluster], nodes, WORKLOADS[model], 768)
    assert (row.degree, row.ring_degree) == (degree, ring)
    assert (row.ring_seconds > 0) == (ring > 1)


def test_a_ring_passes_k_and_v_once_less_than_it_has_groups() -> None:
    machine = dataclasses.replace(
        AURORA, links=tuple(dataclasses.replace(x, latency_seconds=0.0) for x in AURORA.links)
    )
    machine = dataclasses.replace(machine, launch_seconds=0.0)
    row = simulate(machine, 8, QWEN, 1536)
    node = 8 * 25e9 / 12
    assert row.ring_seconds == pytest.approx(2 * 60 * 3 * 2 * row.message_bytes / node)


def test_contention_follows_its_points() -> None:
    machine = dataclasses.replace(AURORA, contention=((1e6, 1.0), (4e6, 3.0)), contention_across_nodes=2.0)
    found = [machine.contention_at(size) for size in (1e3, 1e6, 2e6, 4e6, 1e9)]
    assert found == pytest.approx([1.0, 1.0, 2.0, 3.0, 3.0])
    assert machine.profile(1, 2e6).contention == pytest.approx(2.0)
    assert machine.profile(2, 2e6).contention == pytest.approx(4.0)


def test_aurora_has_the_times_that_it_was_fitted_to() -> None:
    fitted = [finding for finding in paper.validate() if finding.fitted]
    assert len(fitted) == 3
    for finding in fitted:
        assert finding.simulated == pytest.approx(finding.published, rel=0.02), finding.what


def test_a_published_figure_agrees_or_differs() -> None:
    def verdict(simulated: float, relation: str = paper.ABOUT) -> str:
        return paper.Finding("", 1.0, simulated, relation).verdict

    assert [verdict(figure) for figure in (0.7, 0.9, 1.1, 1.3)] == ["differs", "agrees", "agrees", "differs"]
    assert (verdict(0.7, paper.LESS), verdict(1.3, paper.LESS)) == ("agrees", "differs")
    assert (verdict(0.7, paper.MORE), verdict(1.3, paper.MORE)) == ("differs", "agrees")


# What people see.


def test_a_sweep_has_the_keys_of_the_record_and_goes_into_a_table_and_a_chart(tmp_path: Path) -> None:
    from rich.console import Console

    rows = sweep("aurora, pcie", "1,2,8", "qwen-image", "768,1536", "stock,exact,paper")
    assert len(rows) == 2 * 3 * 2 * 3
    keys = ("cluster", "nodes", "degree", "model", "resolution", "mode", "share", "step_seconds", "speedup")
    assert all(key in row for row in rows for key in keys)
    assert all(row["speedup"] == 1 for row in rows if row["mode"] == STOCK)
    console = Console(width=250, record=True, file=io.StringIO())
    console.print(simulate_report.table(rows))
    shown = console.export_text()
    assert "24 x 4" in shown and "hierarchical:tile,gpu" in shown
    simulate_report.draw(rows, tmp_path / "new" / "chart.svg")
    assert (tmp_path / "new" / "chart.svg").read_text().lstrip().startswith("<?xml")


def test_a_validation_goes_into_a_table_and_a_record() -> None:
    findings = [paper.Finding("this", 2.0, 1.0, reason="because"), paper.Finding("that", 1.0, 0.5, paper.LESS)]
    assert simulate_report.validation_table(findings).row_count == 2
    record = simulate_report.validation_record(findings)
    assert record[0]["ratio"] == 0.5 and record[0]["verdict"] == "differs" and record[0]["reason"] == "because"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("mars", "1", "qwen-image", "768"), "--cluster 'mars' is not valid; valid are aurora, dgx-h100"),
        (("aurora", "0", "qwen-image", "768"), "--nodes 0 is not valid"),
        (("aurora", "1,two", "qwen-image", "768"), "--nodes '1,two' is not valid"),
        (("aurora", "1", "sdxl", "768"), "--model 'sdxl' is not valid; valid are flux.1-dev"),
        (("aurora", "1", "qwen-image", "770"), "--resolution 770 is not valid; it must be a positive multiple of 16"),
        (("aurora", "1", "qwen-image", "768", "fast"), "--mode 'fast' is not valid; valid are stock"),
        (("aurora", "1", "qwen-image", "768", "all", 0), "--batch 0 is not valid"),
    ],
)
def test_a_bad_option_is_named_with_its_value_and_what_is_valid(arguments: tuple, said: str) -> None:
    with pytest.raises(ValueError) as error:
        sweep(*arguments)
    assert said in str(error.value)


def test_heads_that_do_not_divide_over_a_node_are_named() -> None:
    with pytest.raises(ValueError, match="8 heads of tiny do not divide over the 12 ranks"):
        simulate(AURORA, 1, TINY, 768)


def test_a_chart_has_a_known_format(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--plot .*chart.txt.*\.svg, \.png, \.pdf"):
        simulate_report.draw([], tmp_path / "chart.txt")
