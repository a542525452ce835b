"""Overlap in xDiT's FLUX.1 on real ranks: the order of events, profiler ranges, and statuses of layers."""

import contextlib
import dataclasses
import math
import os
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks import bare_runtime
from tests import ranks
from xfuser_cocodiff.engine.attention import ulysses
from xfuser_cocodiff.engine.attention.overlap_schedule import OverlapSchedule
from xfuser_cocodiff.engine.autotune.tuning_cache import TuningCache
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.policy import PlanPolicy
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.layers.schedule_candidates import ScheduleCandidates
from xfuser_cocodiff.xdit.session import startup as starting
from xfuser_cocodiff.xdit.session.session import Session
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig, Overlap


def start(rank: int, depth: int = 6, text_tokens: int | None = None) -> tuple:
    """Return the group of all ranks, a FLUX.1 with double and single blocks, and a function that runs one step.

    The text is sharded, unless it has a number of tokens that is not divisible.
    """
    from xfuser.model_executor.models.transformers.transformer_flux import xFuserFlux1Transformer2DWrapper

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")  # not used: the ranks have a store already
    group, doubles = bare_runtime.start(), max(1, depth // 3)
    text = text_tokens or math.ceil(64 / group.size()) * group.size()
    bare_runtime.init_runtime_state(8, text)
    torch.manual_seed(0)
    transformer = xFuserFlux1Transformer2DWrapper(
        in_channels=64,
        num_layers=doubles,
        num_single_layers=depth - doubles,
        attention_head_dim=16,
        num_attention_heads=8,
        joint_attention_dim=64,
        pooled_projection_dim=64,
        axes_dims_rope=(8, 4, 4),
    ).eval()
    inputs = {
        "hidden_states": torch.randn(1, 64, 64),
        "encoder_hidden_states": torch.randn(1, text, 64),
        "pooled_projections": torch.randn(1, 64),
        "timestep": torch.full((1,), 0.5),
        "img_ids": torch.cartesian_prod(torch.zeros(1), torch.arange(8.0), torch.arange(8.0)),
        "txt_ids": torch.zeros(text, 3),
    }

    @torch.inference_mode()
    def step() -> torch.Tensor:
        return transformer(**inputs, return_dict=False)[0]

    return group, transformer, step


def inputs_of(transformer: torch.nn.Module, step: Callable) -> dict[str, Any]:
    """Return the arguments of the transformer in a step."""
    given: dict[str, Any] = {}
    hook = transformer.register_forward_pre_hook(lambda *called: given.update(called[-1]), with_kwargs=True)
    step()
    hook.remove()
    return given


def use_config(group: dist.ProcessGroup, config: CocoDiffConfig, known: TuningCache | None = None) -> Session:
    """Run with a session of this config from now on."""
    session = starting.create_session(group, config, known)
    bare_runtime.use_session(session)
    return session


def use(group: dist.ProcessGroup, v_first: bool | None, groups: int | None = None, policy: Any = None) -> Any:
    """Run with a session on two ranks over flat collectives from now on, with a plan policy if it is given."""
    mesh = Mesh.over(group, Topology.flat(2), [Plan.flat(Topology.flat(2))])
    config = CocoDiffConfig(topology=mesh.topology, overlap=Overlap(v_first, groups))
    session = Session(config, dataclasses.replace(mesh, policy=policy or mesh.policy))
    bare_runtime.use_session(session)
    return session


def record_events(rank: int) -> list[str]:
    """Return the events of a step with known layers: all-to-alls that start, and modules that are called."""
    group, transformer, step = start(rank)
    expected = step()
    session = use(group, True, 2)
    events: list[str] = []
    for name, module in transformer.named_modules():
        if name.endswith((".to_q", ".add_q_proj")):
            module.register_forward_pre_hook(lambda *_, name=name: events.append(name))
    start_value = ulysses.UlyssesAttention.start_value

    def recording(call: ulysses.UlyssesAttention, value: torch.Tensor) -> object:
        events.append(f"{call._layer} sends v")
        return start_value(call, value)

    with mock.patch.object(ulysses.UlyssesAttention, "start_value", recording):
        for _ in range(5):
            events.clear()
            assert torch.equal(step(), expected)
    assert all(signature.ready for signature in session.layers.signatures)
    return events


def test_v_is_sent_before_q_is_projected_in_every_layer() -> None:
    for events in ranks.run(record_events, 2):
        layers = [f"transformer_blocks.{i}" for i in range(2)] + [f"single_transformer_blocks.{i}" for i in range(4)]
        sent = {layer: events.index(f"{layer}.attn sends v") for layer in layers}
        for layer in layers:
            assert sent[layer] < events.index(f"{layer}.attn.to_q")
        for layer in layers[:2]:
            assert sent[layer] < events.index(f"{layer}.attn.add_q_proj")


def profiler_ranges(rank: int) -> Counter[str]:
    """Return the ranges of a profiled step with V-First and two head groups."""
    group, _, step = start(rank, depth=3)
    use(group, True, 2)
    for _ in range(5):
        step()
    every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=every_thread) as trace:
        step()
    dist.barrier()
    return Counter(event.name for event in trace.events() if event.name.startswith("cocodiff."))


def test_every_all_to_all_has_profiler_ranges() -> None:
    for counts in ranks.run(profiler_ranges, 2):
        for tensors, in_layer in {"v": 1, "qk": 1, "qkv": 1, "o": 2}.items():
            for part in ("collective", "wait"):
                assert counts[f"cocodiff.{tensors}.{part}"] == 3 * in_layer, (tensors, part)


@pytest.mark.parametrize("ahead", [False, True])
def test_planner_decides_on_v_first(ahead: bool) -> None:
    """Q, K and V are one message if a message of V costs more than it hides."""
    together = ["qkv", "o"] * 3
    for labels, asked, schedules in ranks.run(step_with_policy, 2, ahead, None):
        assert labels == (["v", "qk", "o"] * 3 if ahead else together)
        usual = "V first, 1 head group" if ahead else "QKV together, 1 head group"
        assert schedules == [usual, f"{usual}, MLP overlapped"]  # of double and of single blocks
        assert asked and {3 * value == whole for value, whole in asked} == {True}


def test_option_takes_precedence_over_the_planner() -> None:
    for labels, asked, _ in ranks.run(step_with_policy, 2, False, True):
        assert labels == ["v", "qk", "o"] * 3
        assert not asked


def step_with_policy(rank: int, ahead: bool, v_first: bool | None) -> tuple[list[str], list, list[str]]:
    """Return the messages of a step with known layers, the sizes the policy was asked for, and schedules."""
    group, _, step = start(rank, depth=3)
    flat, asked = Plan.flat(Topology.flat(2)), []
    policy = PlanPolicy.fixed(flat, sends_early=lambda *sizes: asked.append(sizes) or ahead)
    expected = step()
    labels: list[str] = []

    def recording(original: Callable) -> Callable:
        def recorded(*args: object) -> object:
            labels.extend(arg.tensors for arg in args if isinstance(arg, Label))
            return original(*args)

        return recorded

    with contextlib.ExitStack() as patched:
        for name in ("start_seq_to_heads", "start_heads_to_seq"):
            patched.enter_context(mock.patch.object(ulysses, name, recording(getattr(ulysses, name))))
        session = use(group, v_first, policy=policy)
        session.schedule_tuner = None
        session.config = dataclasses.replace(session.config, timeout=60)  # so that stock's attention does not run
        for _ in range(5):
            labels.clear()
            assert torch.equal(step(), expected)
    return labels, asked, sorted({str(signature.candidates.schedule) for signature in session.layers.signatures})


def step_with_overlapped_mlp(rank: int) -> list[str]:
    """Return the events of the single blocks in a step with V first and two head groups; check the output against
    stock."""
    group, transformer, step = start(rank, depth=3)
    events: list[str] = []
    expected = step()
    session = use_config(group, CocoDiffConfig(topology=Topology.flat(2)))
    session.begin_run(20)
    for _ in range(4):
        step()
        session.end_step()
    for signature in session.layers.signatures:
        assert signature.candidates.schedules[-1].overlaps_mlp == signature.has_parallel_mlp
        signature.candidates = ScheduleCandidates([OverlapSchedule(True, 2, True)])
    signatures = [signature.has_parallel_mlp for signature in session.layers.signatures]
    assert sorted(signatures) == [False, True]  # double blocks have no parallel MLP

    def recording(original: Callable, event: Callable[..., str]) -> Callable:
        return lambda *args, **kwargs: events.append(event(*args)) or original(*args, **kwargs)

    gelu = recording(torch.nn.functional.gelu, lambda *_: "mlp")
    inputs = recording(ulysses.start_seq_to_heads, lambda *args: f"sends {args[2].tensors}")
    outputs = recording(ulysses.start_heads_to_seq, lambda *_: "sends o")
    for _ in range(2):
        events.clear()
        with (
            mock.patch.object(torch.nn.functional, "gelu", gelu),
            mock.patch.object(ulysses, "start_seq_to_heads", inputs),
            mock.patch.object(ulysses, "start_heads_to_seq", outputs),
        ):
            assert torch.equal(step(), expected)
        session.end_step()
    session.close()
    mlp = transformer.single_transformer_blocks[0].proj_mlp
    assert "forward" not in vars(mlp) and torch.is_tensor(mlp(torch.zeros(1, 1, 128)))
    return events


def test_parallel_mlp_is_computed_during_communication() -> None:
    for events in ranks.run(step_with_overlapped_mlp, 2):
        assert events[-5:] == ["sends qk", "sends qkv", "mlp", "sends o", "sends o"]


def depend_on_heads(get: Callable) -> Callable:
    """Return a getter of attention functions whose results depend on the number of heads."""

    def get_dependent(backend: object = None) -> Callable:
        function = get(backend=backend)

        def dependent(query: torch.Tensor, *args: object, **kwargs: object) -> tuple:
            result, *rest = function(query, *args, **kwargs)
            return result * (1 + query.shape[1] * 2**-10), *rest

        return dependent

    return get_dependent
