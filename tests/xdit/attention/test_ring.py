"""Ulysses x Ring on real ranks in both placements, against attention over whole tensors and against stock."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests import ranks
from tests.xdit.test_approximation import STEPS, LossyRun, decibels
from tests.xdit.test_pipelines import used_axes
from xfuser_cocodiff.engine.autotune.link_probe import Probe
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.tools.launching import cpu_host
from xfuser_cocodiff.xdit.platforms import attention_kernels
from xfuser_cocodiff.xdit.session.reductions import all_reduce
from xfuser_cocodiff.xdit.session.session import active

PLACEMENTS = ("outer", "inner")
WORLD, ULYSSES, RING = 4, 2, 2
GROUPS = {"outer": ([0, 1], [0, 2]), "inner": ([0, 2], [0, 1])}
"""Ulysses group and ring of rank 0."""
WHOLE = "node=2,gpu=2"
"""Topology of all ranks: a Ulysses group is in one node, or spans two."""


def start(rank: int, options: dict[str, Any], world: int = WORLD, ring: int = RING, branches: int = 1) -> None:
    """Initialize a runtime state with the groups of these options; each guidance branch has its own."""
    from xfuser import xFuserArgs
    from xfuser.core.distributed import init_distributed_environment, initialize_runtime_state

    init_distributed_environment(rank=rank, world_size=world)
    degrees = {"ulysses_degree": world // ring // branches, "ring_degree": ring, "use_cfg_parallel": branches > 1}
    config = xFuserArgs(model="tiny", **degrees, **options).create_config()[0]
    transformer = SimpleNamespace(config=SimpleNamespace(num_attention_heads=8))
    initialize_runtime_state(SimpleNamespace(transformer=transformer), config)


def ring_options(placement: str, **more: Any) -> dict[str, Any]:
    return {"use_cocodiff": True, "cocodiff_ring": placement, "cocodiff_topology": WHOLE, **more}


def members() -> tuple[list[int], list[int]]:
    import torch.distributed as dist
    from yunchang.globals import PROCESS_GROUP

    groups = PROCESS_GROUP.ULYSSES_PG, PROCESS_GROUP.RING_PG
    return tuple(dist.get_process_group_ranks(group) for group in groups)


def whole(seed: int, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor (B, H, S, D), the same on every rank."""
    return torch.randn(2, 8, tokens, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attend(rank: int, placement: str) -> tuple[list[int], list[int]]:
    """Check USP in a ring, without and with replicated text, against attention on one rank and against stock."""
    from xfuser.model_executor.layers import usp

    start(rank, ring_options(placement, cocodiff_a2a="hierarchical", cocodiff_mode="exact"))
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        tensors = [whole(seed, 24, dtype) for seed in range(3)]
        text = [whole(seed, 5, dtype) for seed in (3, 4, 5)]
        mine = [tensor.chunk(WORLD, 2)[rank] for tensor in tensors]
        for joint in ({}, dict(zip(("joint_query", "joint_key", "joint_value"), text, strict=True))):
            options = {**joint, "joint_strategy": "rear"} if joint else {}
            active().traffic.reset()
            found = usp.USP(*mine, **options)
            assert active().traffic.calls, "fell through to stock"
            stock = usp.USP.__wrapped__(*mine, **options)
            assert torch.equal(found, stock)
            everything = [torch.cat(pair, 2) for pair in zip(tensors, text, strict=True)] if joint else tensors
            expected = functional.scaled_dot_product_attention(*(tensor.float() for tensor in everything))
            image, behind = expected[:, :, :24].chunk(WORLD, 2)[rank], expected[:, :, 24:]
            assert torch.allclose(found.float(), torch.cat([image, behind], 2), atol=tolerance)
    return members()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_attention_in_a_ring_equals_stock(placement: str) -> None:
    assert ranks.run(attend, WORLD, placement)[0] == GROUPS[placement]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32])
def test_computed_lse_equals_flash_attention(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, mask: torch.dtype | None
) -> None:
    """Against the LSE of flash attention for CPUs, and against its definition."""
    monkeypatch.setattr(attention_kernels, "MAX_SCORES", 2 * 3 * 17 * 5)  # five queries at a time
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, size, 16, generator=generator).to(dtype) for size in (23, 17, 17))
    given = None
    if mask is not None:
        given = torch.rand(2, 1, 23, 17, generator=generator)
        given = given < 0.7 if mask is torch.bool else given.to(dtype)
    options = {"attn_mask": given}
    output, found = attention_kernels.sdpa_with_lse(query, key, value, 0.0, False, options)
    other, expected = cpu_host.flash_attention(query, key, value, 0.0, False, options)
    tolerance, lse_tolerance = (1e-6, 1e-5) if dtype == torch.float32 else (1e-2, 1e-3)
    assert torch.allclose(output.float(), other.float(), atol=tolerance)
    assert torch.allclose(found, expected, atol=lse_tolerance)
    scores = query.double() @ key.double().transpose(-1, -2) / 4
    if mask is torch.bool:
        scores = scores.masked_fill(~given, -torch.inf)
    elif mask is not None:
        scores = scores + given.double()
    assert torch.allclose(found.double(), scores.logsumexp(-1), atol=1e-5)


def groups_before_config(rank: int) -> tuple[bool, list[str]]:
    """Make process groups before the config, as some scripts do, and return whether stock runs, and the log."""
    import logging

    from xfuser.core.distributed import init_distributed_environment, initialize_model_parallel

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("xfuser_cocodiff").addHandler(handler)
    init_distributed_environment(rank=rank, world_size=WORLD)
    initialize_model_parallel(sequence_parallel_degree=WORLD, ulysses_degree=ULYSSES, ring_degree=RING)
    start(rank, ring_options("inner"))
    return active().mesh is None, said


def test_groups_of_the_other_placement_fall_back_to_stock() -> None:
    found = ranks.run(groups_before_config, WORLD)
    assert all(is_stock for is_stock, _ in found)
    assert "process groups of an earlier engine, with --cocodiff_ring outer" in found[0][1][0]


def reduce_over_all(rank: int) -> list[float]:
    start(rank, ring_options("outer", cocodiff_a2a="hierarchical", cocodiff_mode="exact"))
    return all_reduce([rank, -rank], "max")


def test_decisions_are_reduced_over_all_ranks_of_a_ring() -> None:
    """Otherwise one Ulysses group might use head groups and the other not, and the ring would hang."""
    assert ranks.run(reduce_over_all, WORLD) == [[3.0, 0.0]] * WORLD


def probe_links(rank: int, folder: str) -> tuple[str, int]:
    """Return a plan and the number of link timings, with links that differ between the groups."""
    import torch.distributed as dist
    from xfuser.model_executor.layers import usp

    fastest, times = Probe.fastest, []

    def slower(self: Probe, *given: Any, **options: Any) -> float:
        times.append(
            (1e-3 if 0 in dist.get_process_group_ranks(self.group) else 5e-3) + fastest(self, *given, **options)
        )
        return times[-1]

    Probe.fastest = slower
    start(rank, ring_options("outer", cocodiff_mode="exact", cocodiff_cache=folder))
    session = active()
    mine = [whole(seed, 24, torch.float32).chunk(WORLD, 2)[rank] for seed in range(3)]
    session.begin_run(100)
    for _ in range(3):
        usp.USP(*mine)
        session.end_step()
    return str(session.mesh.policy.choose(2**16)), len(times)


def test_groups_of_a_ring_agree_on_measured_links(tmp_path: Path) -> None:
    """They also agree in the next process, which reads different measurements from the cache."""
    first = ranks.run(probe_links, WORLD, str(tmp_path))
    assert all(taken for _, taken in first)
    assert len(list(tmp_path.iterdir())) == 2  # one of Ulysses groups, one of rings
    again = ranks.run(probe_links, WORLD, str(tmp_path))
    assert len({plan for plan, _ in again}) == 1 and not any(taken for _, taken in again)


def whole_pipeline(rank: int, placement: str) -> tuple[torch.Tensor, float]:
    """Return stock's latents, which exact mode must equal, and the PSNR in dB of a lossy mode with two slow axes."""
    flags = [f"--{name}={value}" for name, value in ring_options(placement, cocodiff_mode="exact").items()][1:]
    degrees = ["--ulysses_degree", str(ULYSSES), "--ring_degree", str(RING)]
    run = LossyRun(rank, WORLD, "FLUX.1-dev", *degrees, "--use_cocodiff", *flags, "--cocodiff_a2a", "hierarchical")
    axis, around = ("node", "gpu") if placement == "inner" else ("gpu", "node")
    exact = run()
    assert {axis for stage in used_axes() for axis in stage.split("+")} == {"node", "gpu"}
    run.use_plugin(None)
    stock = run()
    assert used_axes() == set()
    assert torch.equal(exact, stock)
    ring_topology = Topology.parse(f"{around}=2")
    run.use_mode("balanced", f"{axis}=2", slow_axes=(axis, around), ring=placement, ring_topology=ring_topology)
    latents, reports = run(), run.runtime.reports
    assert len(reports) == STEPS
    assert all(0 < report.sent_bytes < 0.5 * report.exact_bytes for report in reports[1:])
    return stock, decibels(latents, stock)


@pytest.mark.slow  # test_attention_in_a_ring_equals_stock has no pipeline
@pytest.mark.usefixtures("hub")
def test_pipeline_in_a_ring_equals_stock() -> None:
    outer, inner = (ranks.run(whole_pipeline, WORLD, placement) for placement in PLACEMENTS)
    for (here, quality), (there, other) in zip(outer, inner, strict=True):
        assert decibels(there, here) > 90  # the same picture, except for the order of K and V
        assert 20 < min(quality, other) < 60
