"""Kernels that fail on one rank are replaced on all ranks, with one warning, and are not used where no axis is slow."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from diffusers import FluxTransformer2DModel, Lumina2Transformer2DModel, WanTransformer3DModel

from tests import ranks
from tests.engine.topology.test_planner import profile_of
from tests.xdit.attention.test_overlap import start
from xfuser_cocodiff.engine.autotune import codec_probe
from xfuser_cocodiff.engine.autotune.codec_probe import CodecSpeed
from xfuser_cocodiff.engine.autotune.tuning_cache import TuningCache
from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.compression import codec_check
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.session import kernel_check, start_messages, startup
from xfuser_cocodiff.xdit.settings.config import MEASURED_SLOW_AXES, CocoDiffConfig

FORMAT = kernel_check.HeadFormat(64, torch.float16)
FAST, PYTORCH = 1e12, 1e3
"""Throughput of the codec with Triton's and with PyTorch's kernels, far above and below that of links."""


def started(
    rank: int,
    failures: list[str | None],
    errors: list[bool],
    backends: list[str],
    link: float,
    slow_axes: Any = MEASURED_SLOW_AXES,
) -> tuple[str, bool, str | None, list[str], list[str], list]:
    """Start a session with kernels that fail the self-check, or raise an error in the codec probe.

    Returns:
        The kernels in use, whether the session is lossy, why not, its warnings and infos, and the arguments of checks.
    """
    group, *_ = start(rank, depth=1)
    topology = Topology.parse("2x1", 2)
    config = CocoDiffConfig(topology=topology, mode="balanced", schedule="bits=4", slow_axes=slow_axes)
    links = profile_of([2, 1], [link, link], 1e-6, 1e-6)
    links = TuningCache({}, links.with_codec(0.0, 0.0))
    checks: list[tuple] = []
    warnings: list[str] = []
    infos: list[str] = []

    def measure(device: torch.device) -> CodecSpeed:
        if kernels.backend_for(device) == kernels.TRITON and errors[rank]:
            raise ValueError("no driver\nin detail")
        return CodecSpeed(FAST if kernels.backend_for(device) == kernels.TRITON else PYTORCH, 0.0)

    def failure(*arguments: Any) -> str | None:
        checks.append((*arguments[:3], arguments[4]))
        return failures[rank]

    def backend_for(device: torch.device) -> str:
        return kernels.TORCH if kernels._selected == [kernels.TORCH] else backends[rank]

    with (
        mock.patch.object(kernel_check, "compute_device", lambda: torch.device("cuda")),
        mock.patch.object(kernels, "backend_for", backend_for),
        mock.patch.object(codec_check, "failure", failure),
        mock.patch.object(codec_probe, "measure", measure),
        mock.patch.object(startup, "warn_once", warnings.append),
        mock.patch.object(start_messages, "warn_once", warnings.append),
        mock.patch.object(startup, "info_once", infos.append),
    ):
        session = startup.create_session(group, config, links, values=FORMAT)
    return session.config.kernels, session.runtime is not None, session.lossless_reason, warnings, infos, checks


TRITON = ["triton", "triton"]


def test_kernels_that_pass_are_used() -> None:
    results = ranks.run(started, 2, [None] * 2, [False] * 2, TRITON, 5e7)
    for used, is_lossy, _, warnings, infos, checks in results:
        assert (used, is_lossy, checks) == ("auto", True, [("triton", "balanced", "bits=4", FORMAT)])
        assert len(warnings) == 1 and warnings[0].startswith("lossy: ")
        [line] = [each for each in infos if each.startswith("links of a rank: ")]
        assert "node 0.05 GB/s" in line and "slow is an axis below 100 GB/s, 10% of the codec" in line


@pytest.mark.parametrize(
    ("failures", "errors", "backends", "problem"),
    [
        ([None, "bits"], [False, False], TRITON, "kernels fail their self-check on 1 of 2 ranks (rank 1: bits)"),
        (
            *([None, None], [False, True], TRITON),
            "codec probe failed on 1 of 2 ranks (rank 1: ValueError: no driver)",
        ),
        (
            *([None, None], [False, False], ["triton", "torch"]),
            "ranks have different kernels (rank 0: triton, rank 1: torch)",
        ),
    ],
)
def test_a_failure_on_one_rank_is_named_as_the_reason_on_all(
    failures: list, errors: list, backends: list, problem: str
) -> None:
    """With PyTorch's kernels no axis is slow, and the line says that kernels are the reason."""
    for used, is_lossy, reason, warnings, infos, _ in ranks.run(started, 2, failures, errors, backends, 5e7):
        assert (used, is_lossy) == ("torch", False)
        assert warnings == [reason] and problem in reason and "the run is lossless" in reason
        assert not any("no axis of the topology" in line for line in infos)
        [line] = [each for each in infos if each.startswith("links of a rank: ")]
        assert "slow is an axis below 1e-07 GB/s" in line and "kernels: torch, since others fail" in line


def test_a_failure_makes_named_axes_slower_and_not_lossless() -> None:
    results = ranks.run(started, 2, [None, "bits"], [False] * 2, TRITON, 5e7, ("node",))
    for used, is_lossy, _, warnings, *_ in results:
        assert (used, is_lossy) == ("torch", True)
        assert "which are slower" in warnings[0] and "lossless" not in warnings[0]


def test_no_kernel_is_used_where_no_axis_can_be_slow() -> None:
    """Neither compiled, nor timed or checked: links are nearly as fast as copies."""
    for used, is_lossy, reason, warnings, infos, checks in ranks.run(
        started, 2, ["bits"] * 2, [True] * 2, TRITON, 1e15
    ):
        assert (used, is_lossy, checks, warnings) == ("auto", False, [], [])
        assert "no axis of the topology" in reason
        assert any("% of a copy" in line for line in infos)


@pytest.mark.parametrize(
    ("model", "options", "head_dim"),
    [
        (FluxTransformer2DModel, {"num_single_layers": 1, "attention_head_dim": 16}, 16),
        (Lumina2Transformer2DModel, {"hidden_size": 72, "num_refiner_layers": 1}, 36),
        (WanTransformer3DModel, {"attention_head_dim": 32, "ffn_dim": 8}, 32),
    ],
)
def test_kernels_are_checked_for_the_values_of_the_model(model: Any, options: dict[str, int], head_dim: int) -> None:
    transformer = model(num_attention_heads=2, num_layers=1, **options).half()
    assert kernel_check.head_format(SimpleNamespace(transformer=transformer)) == (head_dim, torch.float16)
