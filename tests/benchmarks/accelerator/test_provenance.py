"""Tests of provenance: tensors without values are equal where real ones on a CPU are.

V-First's check compares V with the outputs of projections, so whole models are the second half of the truth: the
plugin must say the same of their layers as on gloo ranks.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from tests import ranks
from tests.benchmarks.accelerator.emulated import accelerator

HEADS, RESOLUTION, DEGREE, STEPS = 4, 256, 2, 3


def comparisons(given: Callable[[], list[Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return pairs of tensors by name; inputs have shape (1, 6, 24), weights (24, 24)."""
    one, other, weight, second = given()
    project = functional.linear(one, weight)
    fused = functional.linear(one, weight.repeat(3, 1))
    heads = project.unflatten(-1, (4, 6))
    query, key, value = (part.unflatten(-1, (4, 6)).transpose(1, 2) for part in fused.chunk(3, -1))
    other_value, attend = other.unflatten(-1, (4, 6)).transpose(1, 2), functional.scaled_dot_product_attention
    written, also_written = torch.zeros_like(one), torch.zeros_like(one)
    written[:, :3], also_written[:, :3] = one[:, :3], one[:, :3]
    also_written[:, 3:] = other[:, 3:]
    return {
        "itself": (one, one),
        "other": (one, other),
        "repeated": (project, functional.linear(one, weight)),
        "another weight": (project, functional.linear(one, second)),
        "another input": (project, functional.linear(other, weight)),
        "another operation": (one * 2.0, one * 3.0),
        "heads": (heads.transpose(1, 2), project.view(1, 6, 4, 6).permute(0, 2, 1, 3)),
        "copied heads": (heads.transpose(1, 2).contiguous(), project.view(1, 6, 4, 6).permute(0, 2, 1, 3)),
        "tokens": (one[:, 2:], one.narrow(1, 2, 4)),
        "other tokens": (one[:, :3], one[:, 3:]),
        "columns": (fused.chunk(3, -1)[2], fused.narrow(-1, 48, 24)),
        "columns of columns": (fused.split([48, 24], -1)[0].chunk(2, -1)[1], fused.narrow(-1, 24, 24)),
        "other columns": (fused.chunk(3, -1)[1] + other, fused.chunk(3, -1)[2] + one),
        "joint": (torch.cat([heads, one.unflatten(-1, (4, 6))], 1), torch.cat([project, one], 1).unflatten(-1, (4, 6))),
        "joint heads": (
            torch.cat([heads.transpose(1, 2), one.unflatten(-1, (4, 6)).transpose(1, 2)], 2),
            torch.cat([project, one], 1).unflatten(-1, (4, 6)).transpose(1, 2),
        ),
        "joint in another order": (torch.cat([one, other], 1), torch.cat([other, one], 1)),
        "attention": (attend(query, key, value), attend(query, key, value)),
        "attention to other values": (attend(query, key, value), attend(query, key, other_value)),
        "written": (written, also_written),
        "zeros": (torch.cat([one, one.new_zeros(1, 2, 24)], 1), torch.cat([one, one.new_zeros(1, 2, 24)], 1)),
        "in place": (one.clone().add_(other), one),
        "copied": (torch.empty_like(one).copy_(one), one),
        "shape": (one, one[:, :5]),
    }


def compare(rank: int) -> tuple[dict[str, bool], list[dict[str, bool]]]:
    """Return which pairs are equal on a CPU, and on an accelerator, on which all operations are known later."""

    def values() -> list[Tensor]:
        torch.manual_seed(0)
        return [torch.randn(1, 6, 24), torch.randn(1, 6, 24), torch.randn(24, 24), torch.randn(24, 24)]

    expected = {name: torch.equal(*pair) for name, pair in comparisons(values).items()}
    with accelerator() as emulator:
        given = [value.to(emulator.device) for value in values()]
        return expected, [
            {name: torch.equal(*pair) for name, pair in comparisons(lambda: given).items()} for _ in range(3)
        ]


def test_tensors_are_equal_as_on_a_cpu() -> None:
    [(expected, emulated)] = ranks.run(compare, 1)
    assert {True, False} == {*expected.values()}
    for each in emulated:
        assert each == expected


def test_empty_tensors_and_host_values_equal_nothing() -> None:
    assert ranks.run(unknown, 1) == [[False] * 6]


def unknown(rank: int) -> list[bool]:
    with accelerator() as emulator:
        on_host = torch.zeros(3)
        return [
            torch.equal(*pair)
            for _ in range(2)
            for pair in (
                (torch.empty(3, device=emulator.device), torch.empty(3, device=emulator.device)),
                (torch.randn(3, device=emulator.device), torch.randn(3, device=emulator.device)),
                (on_host.to(emulator.device), on_host.to(emulator.device)),
            )
        ]


def statuses(rank: int, name: str, is_emulated: bool) -> list[str]:
    """Return what the plugin says of V in a narrow model's layers, of those that use USP."""
    from xfuser_cocodiff.xdit.integration import activation

    activation.activate()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")  # xDiT checks them
    if not is_emulated:
        from xfuser_cocodiff.lab.launching import bare_runtime

        bare_runtime.start()
        with torch.inference_mode():
            return _statuses(name, torch.device("cpu"))
    from benchmarks.accelerator import device_type
    from xfuser_cocodiff.engine.comm import failure_detection

    new_group = dist.new_group
    with (
        accelerator(DEGREE) as emulator,
        mock.patch.object(
            dist, "new_group", lambda members=None, *_, **__: new_group(members, backend=device_type.BACKEND)
        ),
        mock.patch.object(failure_detection, "start_heartbeat", lambda: None),
    ):
        from benchmarks.cluster.recording import independent_heads_and_queries
        from xfuser_cocodiff.lab.launching import bare_runtime

        bare_runtime.start()
        with independent_heads_and_queries():  # which ranks on gloo verify
            return _statuses(name, emulator.device)


def _statuses(name: str, device: torch.device) -> list[str]:
    from benchmarks.full_size import transformer
    from benchmarks.modes import parse_mode
    from xfuser_cocodiff.engine.autotune.tuning_cache import TuningCache
    from xfuser_cocodiff.engine.topology.link_profile import AxisLink, Profile
    from xfuser_cocodiff.engine.topology.topology import Topology
    from xfuser_cocodiff.lab.launching import bare_runtime
    from xfuser_cocodiff.xdit.session import startup
    from xfuser_cocodiff.xdit.settings.ring_placement import UlyssesRingSplit

    topology = Topology.named(gpu=DEGREE)
    profile = Profile(topology, (AxisLink("gpu", 1e-5, 1e9),), 1e-5, 1e12, 1e12, 1.0)
    original = transformer.architecture

    def narrow(model: str) -> tuple:
        workload, parts = original(model)
        arguments = {**parts.arguments}
        if "caption_projection_dim" in arguments:
            arguments["caption_projection_dim"] = HEADS * workload.head_dim
        return dataclasses.replace(workload, heads=HEADS), dataclasses.replace(parts, arguments=arguments)

    with mock.patch.object(transformer, "architecture", narrow):
        full = transformer.build(name, 2, device)
    make_inputs = transformer.INPUTS[name]

    def filled_inputs(*arguments: Any) -> dict[str, Any]:
        inputs = make_inputs(*arguments)
        _fill(value for value in inputs.values() if isinstance(value, Tensor))
        return inputs

    for module in full.model.modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False), *vars(module).values())
        _fill(value for value in own if isinstance(value, Tensor))
    config = parse_mode("exact", topology, UlyssesRingSplit(DEGREE, 1))
    session = startup.create_session(bare_runtime.process_groups()[0], config, TuningCache({}, profile))
    bare_runtime.use_session(session)
    size = (480, 1, 1) if "wan" in name else (RESOLUTION,)
    with mock.patch.dict(transformer.INPUTS, {name: filled_inputs}):
        for _ in range(STEPS):
            full.call(*size)
            session.end_step()
    report = session.layers.signatures.report()
    return sorted(f"{layer}: {status}" for layer, each in report.items() for status in each)


def _fill(tensors: Iterable[Tensor]) -> None:
    """Give uninitialized tensors values, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in tensors:
            tensor.copy_((torch.randn(tensor.shape, generator=generator) * 0.05).to(tensor.dtype))


@pytest.mark.slow  # no quick test runs a whole model here
@pytest.mark.parametrize("name", ["flux.1-dev", "sd3.5-large", "qwen-image", "wan2.1-14b"])
def test_v_of_models_goes_first_as_on_gloo_ranks(name: str) -> None:
    [emulated] = ranks.run(statuses, 1, name, True)
    real = ranks.run(statuses, DEGREE, name, False)
    assert any("V can go first" in status for status in real[0])
    assert emulated == real[0] == real[1]
