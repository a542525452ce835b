"""Full-size transformers have the parameters, attention shapes and FLOPs of the real models.

One process stands for all ranks of a group: tensors are fake, and so are the collectives (PyTorch's "fake" backend).
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from benchmarks import bare_runtime
from benchmarks.full_size.architectures import ARCHITECTURES, LAST
from benchmarks.full_size.transformer import FullSizeTransformer, build
from tests import ranks
from tests.quick import slow
from xfuser_cocodiff.tools.simulation.layers import CROSS_TEXT, IMAGE, JOINT, ROW, TEXT
from xfuser_cocodiff.tools.simulation.sharding import shard
from xfuser_cocodiff.tools.simulation.workloads import WORKLOADS

Shape = tuple[int, ...]
PARAMETERS = {
    "flux.1-dev": 11.9e9,
    "flux.2-dev": 32e9,
    "sd3.5-large": 8.1e9,
    "qwen-image": 20.4e9,
    "hunyuanvideo": 13e9,
    "wan2.1-14b": 14.3e9,
}
"""Parameters of the real transformers, as published with their weights."""


def attention_flops(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
}
"""FLOPs of the CPU's attention, which PyTorch's counter lacks."""


@contextmanager
def group(degree: int) -> Iterator[None]:
    """Return a context of fake tensors on a rank of a group whose collectives only have shapes."""
    dist.destroy_process_group()
    bare_runtime.start_alone(degree)
    with FakeTensorMode():
        yield


@contextmanager
def attention_calls() -> Iterator[list[dict[str, Any]]]:
    """Collect the arguments of xDiT's `USP`."""
    from xfuser.model_executor.layers import usp

    calls, original = [], usp.USP

    def watched(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append({"query": query, "key": key, "value": value, **options})
        return original(query, key, value, **options)

    users = [module for name, module in sys.modules.items() if name.startswith("xfuser.model_executor")]
    users = [module for module in users if getattr(module, "USP", None) is original]
    for module in users:
        module.USP = watched
    yield calls
    for module in users:
        module.USP = original


def num_parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def parameters(rank: int, name: str) -> float:
    """Return the number of parameters of the real model, by extrapolation from one block of each kind."""
    with group(1):
        full = build(WORKLOADS[name], 1, torch.device("cpu"))
    counts = ARCHITECTURES[name].counts(full.workload)
    missing = {kind: counts[kind] - len(blocks) for kind, blocks in full.blocks.items()}
    assert sum(counts.values()) == full.workload.layers
    assert list(counts) == list(full.blocks)
    return num_parameters(full.model) + sum(missing[kind] * num_parameters(full.blocks[kind][0]) for kind in missing)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_of_the_real_model(name: str) -> None:
    [total] = ranks.run(parameters, 1, name)
    assert total == pytest.approx(PARAMETERS[name], rel=0.02)


def shapes(rank: int, name: str, resolution: int, degree: int, batch: int) -> tuple[list, tuple[int, ...]]:
    """Return the shapes of Q, K and V in each call of attention, and that of the output.

    Text that is replicated is joined to Q here, as in attention, and not to K and V.
    """
    with group(degree), attention_calls() as calls:
        full = build(WORKLOADS[name], 2, torch.device("cpu"))
        output = full.call(resolution, batch)
    for call in calls:
        if call.get("joint_query") is not None:
            call["query"] = torch.cat([call["query"], call["joint_query"]], dim=2)
    return [[tuple(call[tensor].shape) for tensor in ("query", "key", "value")] for call in calls], tuple(output.shape)


@pytest.mark.parametrize(
    ("name", "resolution", "degree", "batch", "output"),
    [
        slow("flux.1-dev", 1024, 2, 1, (64 * 64, 64)),
        slow("flux.1-dev", 768, 12, 3, (48 * 48, 64)),
        slow("flux.2-dev", 2304, 16, 1, (144 * 144, 128)),
        slow("sd3.5-large", 1024, 2, 1, (16, 64, 128)),
        ("sd3.5-large", 1216, 19, 2, (16, 8, 152)),
        slow("qwen-image", 1024, 8, 1, (64 * 64, 64)),
        slow("qwen-image", 800, 3, 1, (50 * 50, 64)),
        slow("hunyuanvideo", 720, 8, 1, (16, 33, 90, 160)),
        ("wan2.1-14b", 720, 8, 1, (16, 21, 90, 160)),
    ],
)
def test_attention_has_the_shapes_of_the_shard(
    name: str, resolution: int, degree: int, batch: int, output: tuple[int, ...]
) -> None:
    [(calls, shape)] = ranks.run(shapes, 1, name, resolution, degree, batch)
    workload, parts, tokens = WORKLOADS[name], ARCHITECTURES[name], shard(WORKLOADS[name], resolution, degree)
    rows = batch * workload.rows_per_image
    expected = [(rows, workload.heads, tokens.num_tokens(tensor), workload.head_dim) for tensor in "qkv"]
    assert calls == sum(min(2, count) for count in parts.counts(workload).values()) * [expected]
    assert shape == (rows, *output)


def flops(rank: int, name: str, resolution: int, degree: int) -> dict[str, int]:
    """Return the FLOPs of the first block of each kind."""
    with group(degree):
        full = build(WORKLOADS[name], 1, torch.device("cpu"))
        with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
            full.call(resolution, 1)
    counts = {module: sum(each.values()) for module, each in counter.get_flop_counts().items()}
    return {kind: counts[_path(full, blocks[0])] for kind, blocks in full.blocks.items()}


def _path(full: FullSizeTransformer, block: torch.nn.Module) -> str:
    """Return the name of a block in the FLOP counter."""
    [name] = [name for name, module in full.model.named_modules() if module is block]
    return f"{type(full.model).__name__}.{name}"


@pytest.mark.parametrize(
    ("name", "resolution", "degree"),
    [
        slow("flux.1-dev", 1024, 8),
        slow("flux.2-dev", 1024, 16),
        ("sd3.5-large", 1024, 2),
        slow("qwen-image", 1024, 8),
        slow("hunyuanvideo", 720, 8),
        ("wan2.1-14b", 720, 8),
    ],
)
def test_flops_are_those_of_the_workload(name: str, resolution: int, degree: int) -> None:
    [counted] = ranks.run(flops, 1, name, resolution, degree)
    expected = {kind: expected_flops(name, kind, resolution, degree) for kind in counted}
    assert counted == pytest.approx(expected, rel=1e-9)


def expected_flops(name: str, kind: str, resolution: int, degree: int) -> float:
    """Return the FLOPs of a block by the formulas of the simulator."""
    workload, tokens = WORKLOADS[name], shard(WORKLOADS[name], resolution, degree)
    cross = workload.cross_text_tokens
    counts = {IMAGE: tokens.image, TEXT: tokens.text, JOINT: tokens.queries, CROSS_TEXT: cross, ROW: 1}
    [layer] = [each for each in workload.kinds if each.name == ("double" if kind == LAST else kind)]
    flops = sum(work.flops(counts, workload.width) for work in layer.parts)
    flops += workload.attention_flops(tokens.queries * degree, tokens.attended, workload.heads / degree)
    if layer.has_cross_attention:
        flops += workload.attention_flops(tokens.queries, cross, workload.heads)
    if kind == LAST:  # it discards its text: no output projection, no MLP, and 2 of 6 vectors of modulation
        flops -= 2 * (9 * tokens.text + 4) * workload.width**2
    return workload.rows_per_image * flops
