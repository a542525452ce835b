"""Tests of the simulator: FLOPs against PyTorch's counter, and bounds that hold on any machine."""

import dataclasses
import inspect
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from xfuser_cocodiff import cli
from xfuser_cocodiff.engine.settings.ring_placement import UlyssesRingSplit
from xfuser_cocodiff.engine.topology import planner
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.lab.simulation.machines import AURORA, MACHINES, Machine
from xfuser_cocodiff.lab.simulation.simulate import MODES, scenario_on_nodes, sweep
from xfuser_cocodiff.lab.simulation.step_time import STOCK, Scenario, estimate_step, layer_seconds, rank_splits
from xfuser_cocodiff.lab.simulation.workloads import WORKLOADS, Workload

scenarios = st.builds(
    scenario_on_nodes,
    machine=st.sampled_from(list(MACHINES.values())),
    nodes=st.sampled_from([1, 2, 4, 6]),
    workload=st.sampled_from(list(WORKLOADS.values())),
    resolution=st.sampled_from([256, 768, 2304]),
    batch=st.sampled_from([1, 32]),
)
few_examples = settings(max_examples=20)


def on_machine(scenario: Scenario, machine: Machine) -> Scenario:
    """Return the scenario on another machine."""
    return dataclasses.replace(scenario, link_profile=machine.link_profile, flops=machine.flops)


def with_free_communication(machine: Machine) -> Machine:
    """Return the machine with links and collectives that take no time."""
    links = tuple(dataclasses.replace(link, latency_seconds=0.0, bytes_per_second=math.inf) for link in machine.links)
    return dataclasses.replace(machine, links=links, launch_seconds=0.0, copy_bytes_per_second=math.inf)


# FLOPs.


def step_flops(workload: Workload, resolution: int) -> float:
    """Return the FLOPs of a step on a single rank."""
    scenario = Scenario(workload, resolution, 1, 1, Topology.flat(1), AURORA.link_profile, flops=1.0)
    return estimate_step(scenario, UlyssesRingSplit(1, 1), STOCK).compute_seconds


def tiny_transformer(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor], Workload]:
    """Return a small model of diffusers, inputs of 16 x 16 image tokens, and its workload in the simulator."""
    from diffusers import models

    image, text, heads, dim = 256, 32, 4, 16
    size = {"num_attention_heads": heads, "attention_head_dim": dim, "num_layers": 2}
    rope, channels = (4, 6, 6), 8
    ids = {"img_ids": torch.zeros(image, 3), "txt_ids": torch.zeros(text, 3)}
    states = {"hidden_states": torch.zeros(1, image, channels), "encoder_hidden_states": torch.zeros(1, text, channels)}
    half = torch.tensor([0.5])
    workload = Workload(name, 5, heads, dim, mlp_ratio=4, gated=False, text_tokens=text)
    if name == "flux.1-dev":
        model = models.FluxTransformer2DModel(
            in_channels=channels, num_single_layers=3, joint_attention_dim=channels, pooled_projection_dim=8,
            axes_dims_rope=rope, **size
        )  # fmt: skip
        return model, {**states, **ids, "pooled_projections": torch.zeros(1, 8), "timestep": half}, workload
    if name == "flux.2-dev":
        model = models.Flux2Transformer2DModel(
            in_channels=channels, num_single_layers=3, joint_attention_dim=channels, timestep_guidance_channels=8,
            axes_dims_rope=(4, 4, 4, 4), **size
        )  # fmt: skip
        ids = {"img_ids": torch.zeros(image, 4), "txt_ids": torch.zeros(text, 4)}
        workload = dataclasses.replace(workload, mlp_ratio=3, gated=True)
        return model, {**states, **ids, "timestep": half, "guidance": half}, workload
    if name == "qwen-image":
        model = models.QwenImageTransformer2DModel(
            in_channels=channels, out_channels=2, joint_attention_dim=channels, axes_dims_rope=rope, **size
        )
        mask = torch.ones(1, text, dtype=torch.bool)
        inputs = {"encoder_hidden_states_mask": mask, "timestep": half, "img_shapes": [[(1, 16, 16)]]}
        return model, {**states, **inputs}, dataclasses.replace(workload, layers=2)
    model = models.SD3Transformer2DModel(
        sample_size=32, in_channels=2, out_channels=2, joint_attention_dim=channels, caption_projection_dim=heads * dim,
        pooled_projection_dim=8, pos_embed_max_size=32, **(size | {"num_layers": 6})
    )  # fmt: skip
    inputs = {"pooled_projections": torch.zeros(1, 8), "timestep": half}
    inputs |= {"hidden_states": torch.zeros(1, 2, 32, 32)}
    return model, states | inputs, dataclasses.replace(workload, layers=6)


@pytest.mark.parametrize("name", WORKLOADS)
def test_flops_match_the_counter_of_pytorch(name: str) -> None:
    """The counter includes embeddings and modulation, a few percent at this size."""
    model, inputs, workload = tiny_transformer(name)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # the counter does not support the fused CPU kernel
        model(**inputs, return_dict=False)
    assert step_flops(workload, 256) == pytest.approx(counter.get_total_flops(), rel=0.04)


@pytest.mark.parametrize(
    ("name", "transformer"),
    [
        ("flux.1-dev", "FluxTransformer2DModel"),
        ("flux.2-dev", "Flux2Transformer2DModel"),
        ("qwen-image", "QwenImageTransformer2DModel"),
    ],
)
def test_dimensions_equal_the_defaults_of_diffusers(name: str, transformer: str) -> None:
    from diffusers import models

    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(getattr(models, transformer).__init__).parameters.items()
    }
    workload = WORKLOADS[name]
    assert workload.layers == defaults["num_layers"] + defaults.get("num_single_layers", 0)
    assert (workload.heads, workload.head_dim) == (defaults["num_attention_heads"], defaults["attention_head_dim"])


# Overlap.

LAYER = {"projection": 3.0, "mlp_projections": 8, "attention": 10.0, "all_to_alls": dict.fromkeys("qkvo", 4.0)}
COMPUTE, ALL_TO_ALLS = 12 * 3 + 10, 4 * 4


@pytest.mark.parametrize(
    ("ring", "ring_seconds", "v_first", "hidden"),
    [
        (1, 0.0, False, 0.0),
        (1, 0.0, True, 4.0),  # V's all-to-all is shorter than two projections
        (2, 3.0, False, 3.0),  # attention to a rank's own K and V takes 5
        (2, 7.0, True, 5.0 + 4.0),
    ],
)
def test_hidden_communication_of_a_layer(ring: int, ring_seconds: float, v_first: bool, hidden: float) -> None:
    seconds = layer_seconds(**LAYER, ring=ring, ring_seconds=ring_seconds, v_first=v_first)
    assert seconds == COMPUTE + ALL_TO_ALLS + ring_seconds - hidden
    slow_links = {**LAYER, "all_to_alls": dict.fromkeys("qkvo", 100.0)}
    assert layer_seconds(**slow_links, ring=1, ring_seconds=0.0, v_first=True) == COMPUTE + 400 - 6


# Bounds.


@given(scenario=scenarios, mode=st.sampled_from(MODES))
@few_examples
def test_step_time_is_between_the_longest_part_and_the_sum(scenario: Scenario, mode: str) -> None:
    best = rank_splits(scenario, mode)[0]
    communication = best.a2a_seconds + best.ring_seconds
    assert max(best.compute_seconds, communication) <= best.step_seconds * (1 + 1e-9)
    assert best.step_seconds <= (best.compute_seconds + communication) * (1 + 1e-9)


@given(scenario=scenarios, mode=st.sampled_from(MODES))
@few_examples
def test_step_time_is_compute_time_if_communication_is_free(scenario: Scenario, mode: str) -> None:
    machine = next(machine for machine in MACHINES.values() if machine.link_profile == scenario.link_profile)
    split = rank_splits(scenario, STOCK)[0].split
    estimate = estimate_step(on_machine(scenario, with_free_communication(machine)), split, mode)
    assert estimate.step_seconds == pytest.approx(estimate.compute_seconds)
    assert estimate.a2a_seconds == estimate.ring_seconds == 0
    if not scenario.shard.remarks and not scenario.shard.problem:
        total = scenario.batch * step_flops(scenario.workload, scenario.resolution)
        assert estimate.compute_seconds == pytest.approx(total / scenario.topology.size / machine.flops)


@given(scenario=scenarios)
@few_examples
def test_exact_is_not_slower_than_stock_with_the_same_split(scenario: Scenario) -> None:
    stock = rank_splits(scenario, STOCK)[0]
    assert estimate_step(scenario, stock.split, "exact").step_seconds <= stock.step_seconds * (1 + 1e-9)


# Machines.


def test_contention_is_interpolated_between_its_points() -> None:
    machine = dataclasses.replace(AURORA, contention=((1e6, 1.0), (4e6, 3.0)), internode_contention=2.0)
    factors = [machine.contention_at(size) for size in (1e3, 1e6, 2e6, 4e6, 1e9)]
    assert factors == pytest.approx([1.0, 1.0, 2.0, 3.0, 3.0])
    assert machine.link_profile(machine.topology(1), 2e6).contention == pytest.approx(2.0)
    assert machine.link_profile(machine.topology(2), 2e6).contention == pytest.approx(4.0)


def test_aurora_reproduces_the_times_it_was_fitted_to() -> None:
    """The paper, on 12 ranks: oneCCL's all-to-all takes 25.5 ms for 48 MB, and 1.1 times TAPA's time for 6 MB."""

    def seconds(rule: str, message: float) -> float:
        profile = AURORA.link_profile(AURORA.topology(1), message)
        return planner.all_to_all_seconds(profile, Plan.parse(rule, profile.topology), message)

    assert seconds("flat", 48e6) == pytest.approx(25.5e-3, rel=0.02)
    assert seconds("flat", 6e6) == pytest.approx(1.1 * seconds("hierarchical", 6e6), rel=0.02)
    assert seconds("hierarchical", 48e6) == pytest.approx(6e-3, rel=0.2)  # from the paper, not fitted


# The command.


def test_rows_have_the_keys_of_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "record.json"
    options = ["--cluster", "aurora, pcie", "--nodes", "1,2", "--resolution", "768,1536", "--mode", "stock,exact,fast"]
    assert cli.main(["simulate", *options, "--json", str(record)]) == 0
    rows = json.loads(record.read_text())["rows"]
    assert len(rows) == 2 * 2 * 2 * 3
    keys = ("cluster", "nodes", "degree", "model", "resolution", "mode", "share", "step_seconds", "speedup")
    assert all(key in row for row in rows for key in keys)
    for stock, *modes in (rows[first : first + 3] for first in range(0, len(rows), 3)):
        assert (stock["mode"], stock["speedup"]) == (STOCK, 1)
        assert [row["speedup"] for row in modes] == [stock["step_seconds"] / row["step_seconds"] for row in modes]
    assert "12 x 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mars", "1", "qwen-image", "768"), "--cluster 'mars' is not valid; valid are aurora, dgx-h100"),
        (("aurora", "0", "qwen-image", "768"), "--nodes 0 is not valid"),
        (("aurora", "1,two", "qwen-image", "768"), "--nodes '1,two' is not valid"),
        (("aurora", "1", "sdxl", "768"), "--model 'sdxl' is not valid; valid are flux.1-dev"),
        (("aurora", "1", "qwen-image", "770"), "--resolution 770 is not valid; it must be a positive multiple of 16"),
        (("aurora", "1", "qwen-image", "768", "slow"), "--mode 'slow' is not valid; valid are stock"),
        (("aurora", "1", "qwen-image", "768", "all", 0), "--batch 0 is not valid"),
    ],
)
def test_errors_have_option_value_and_valid_set(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError) as error:
        sweep(*arguments)
    assert message in str(error.value)
