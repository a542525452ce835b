"""The simulator, against FLOPs taken by hand or from PyTorch, and against laws that any machine obeys."""

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
from xfuser_cocodiff.lab.simulation.simulate import MODES, case_on, sweep
from xfuser_cocodiff.lab.simulation.step_time import STOCK, Case, layer_seconds, predict, predictions
from xfuser_cocodiff.lab.simulation.workloads import WORKLOADS, Workload

cases = st.builds(
    case_on,
    machine=st.sampled_from(list(MACHINES.values())),
    nodes=st.sampled_from([1, 2, 4, 6]),
    workload=st.sampled_from(list(WORKLOADS.values())),
    resolution=st.sampled_from([256, 768, 2304]),
    batch=st.sampled_from([1, 32]),
)
few = settings(deadline=None, max_examples=20)


def changed(case: Case, machine: Machine) -> Case:
    """The same on another machine."""
    return dataclasses.replace(case, profile_of=machine.over, flops=machine.flops)


def boundless(machine: Machine) -> Machine:
    """The machine with links and collectives that take no time."""
    links = tuple(dataclasses.replace(link, latency_seconds=0.0, bytes_per_second=math.inf) for link in machine.links)
    return dataclasses.replace(machine, links=links, launch_seconds=0.0, copy_bytes_per_second=math.inf)


# FLOPs.


def flops(work: Workload, resolution: int) -> float:
    """Of a step, on a rank that shares nothing."""
    case = Case(work, resolution, 1, 1, Topology.flat(1), AURORA.over, flops=1.0)
    return predict(case, UlyssesRingSplit(1, 1), STOCK).compute_seconds


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
    assert flops(work, 256) == pytest.approx(counter.get_total_flops(), rel=0.04)


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


# What overlaps.

LAYER = {"projection": 3.0, "mlp_projections": 8, "attention": 10.0, "exchanges": dict.fromkeys("qkvo", 4.0)}
COMPUTES, SENDS = 12 * 3 + 10, 4 * 4


@pytest.mark.parametrize(
    ("ring", "ring_seconds", "v_first", "hidden"),
    [
        (1, 0.0, False, 0.0),
        (1, 0.0, True, 4.0),  # V's exchange is shorter than two projections
        (2, 3.0, False, 3.0),  # attention to its own K and V takes 5
        (2, 7.0, True, 5.0 + 4.0),
    ],
)
def test_what_overlaps_by_hand(ring: int, ring_seconds: float, v_first: bool, hidden: float) -> None:
    found = layer_seconds(**LAYER, ring=ring, ring_seconds=ring_seconds, v_first=v_first)
    assert found == COMPUTES + SENDS + ring_seconds - hidden
    slow = {**LAYER, "exchanges": dict.fromkeys("qkvo", 100.0)}
    assert layer_seconds(**slow, ring=1, ring_seconds=0.0, v_first=True) == COMPUTES + 400 - 6


# Laws.


@given(case=cases, mode=st.sampled_from(MODES))
@few
def test_a_step_lies_between_its_longest_part_and_their_sum(case: Case, mode: str) -> None:
    found = predictions(case, mode)[0]
    moved = found.a2a_seconds + found.ring_seconds
    assert max(found.compute_seconds, moved) <= found.step_seconds * (1 + 1e-9)
    assert found.step_seconds <= (found.compute_seconds + moved) * (1 + 1e-9)


@given(case=cases, mode=st.sampled_from(MODES))
@few
def test_without_communication_a_step_is_its_compute(case: Case, mode: str) -> None:
    machine = next(one for one in MACHINES.values() if one.over == case.profile_of)
    split = predictions(case, STOCK)[0].split
    found = predict(changed(case, boundless(machine)), split, mode)
    assert found.step_seconds == pytest.approx(found.compute_seconds)
    assert found.a2a_seconds == found.ring_seconds == 0
    if not case.shard.remarks and not case.shard.problem:
        every = case.batch * flops(case.workload, case.resolution)
        assert found.compute_seconds == pytest.approx(every / case.topology.size / machine.flops)


@given(case=cases)
@few
def test_exact_is_not_slower_than_stock_of_the_same_split(case: Case) -> None:
    stock = predictions(case, STOCK)[0]
    assert predict(case, stock.split, "exact").step_seconds <= stock.step_seconds * (1 + 1e-9)


# Machines.


def test_contention_follows_its_points() -> None:
    machine = dataclasses.replace(AURORA, contention=((1e6, 1.0), (4e6, 3.0)), contention_across_nodes=2.0)
    found = [machine.contention_at(size) for size in (1e3, 1e6, 2e6, 4e6, 1e9)]
    assert found == pytest.approx([1.0, 1.0, 2.0, 3.0, 3.0])
    assert machine.over(machine.topology(1), 2e6).contention == pytest.approx(2.0)
    assert machine.over(machine.topology(2), 2e6).contention == pytest.approx(4.0)


def test_aurora_has_the_times_that_it_was_fitted_to() -> None:
    """The paper's, for 12 ranks: oneCCL's all-to-all of 48 MB in 25.5 ms, and at 6 MB in 1.1 times TAPA's time."""

    def seconds(rule: str, message: float) -> float:
        profile = AURORA.over(AURORA.topology(1), message)
        return planner.all_to_all_seconds(profile, Plan.parse(rule, profile.topology), message)

    assert seconds("flat", 48e6) == pytest.approx(25.5e-3, rel=0.02)
    assert seconds("flat", 6e6) == pytest.approx(1.1 * seconds("hierarchical", 6e6), rel=0.02)
    assert seconds("hierarchical", 48e6) == pytest.approx(6e-3, rel=0.2)  # the paper's, not fitted


# The command.


def test_a_sweep_has_the_keys_of_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "record.json"
    options = ["--cluster", "aurora, pcie", "--nodes", "1,2", "--resolution", "768,1536", "--mode", "stock,exact,fast"]
    assert cli.main(["simulate", *options, "--json", str(record)]) == 0
    rows = json.loads(record.read_text())["rows"]
    assert len(rows) == 2 * 2 * 2 * 3
    keys = ("cluster", "nodes", "degree", "model", "resolution", "mode", "share", "step_seconds", "speedup")
    assert all(key in row for row in rows for key in keys)
    for stock, *ours in (rows[place : place + 3] for place in range(0, len(rows), 3)):
        assert (stock["mode"], stock["speedup"]) == (STOCK, 1)
        assert [row["speedup"] for row in ours] == [stock["step_seconds"] / row["step_seconds"] for row in ours]
    assert "12 x 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
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
def test_a_bad_option_is_named_with_its_value_and_what_is_valid(arguments: tuple, said: str) -> None:
    with pytest.raises(ValueError) as error:
        sweep(*arguments)
    assert said in str(error.value)
