"""Kernels that fail their self-check on one rank are replaced on all ranks, with one warning."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from xfuser_cocodiff.engine import kernels
from xfuser_cocodiff.engine.settings.config import CocoDiffConfig
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.session import kernel_check


def checked(rank: int, backends: list[str], failures: list[str | None], mode: str) -> tuple[str, list, list[str]]:
    """Return the kernels in use after the check on an accelerator, what was checked, and the warnings."""
    config = CocoDiffConfig(topology=Topology.flat(2), mode=mode, schedule="bits=4")
    calls, warnings = [], []

    def failure(*arguments: object) -> str | None:
        calls.append(arguments)
        return failures[rank]

    with (
        mock.patch.object(kernel_check, "compute_device", lambda: torch.device("cuda")),
        mock.patch.object(kernels, "backend_for", lambda device: backends[rank]),
        mock.patch.object(kernel_check.codec_check, "failure", failure),
        mock.patch.object(kernel_check, "warn_once", warnings.append),
    ):
        used = kernel_check.with_checked_kernels(config, dist.group.WORLD, head_dim=64).kernels
    return used, [(*call[:3], call[4]) for call in calls], warnings


@pytest.mark.parametrize(
    ("backends", "failures", "used"),
    [
        (["triton", "triton"], [None, None], "auto"),
        (["triton", "triton"], [None, "bits"], "torch"),
        (["torch", "triton"], [None, "bits"], "torch"),  # a host without a compiler takes part
    ],
)
def test_ranks_agree_on_kernels(backends: list[str], failures: list[str | None], used: str) -> None:
    for rank, (found, calls, warnings) in enumerate(ranks.run(checked, 2, backends, failures, "balanced")):
        assert found == used
        assert calls == ([("triton", "balanced", "bits=4", 64)] if backends[rank] == "triton" else [])
        if used == "auto":
            assert not warnings
        else:
            assert len(warnings) == 1 and "on 1 of 2 ranks (rank 1: triton, bits)" in warnings[0]


def test_ranks_without_triton_make_all_use_pytorch() -> None:
    """Sender and receiver would compute their references by different kernels."""
    for found, _, warnings in ranks.run(checked, 2, ["triton", "torch"], [None, None], "balanced"):
        assert found == "torch"
        assert len(warnings) == 1 and "different kernels (rank 0: triton, rank 1: torch)" in warnings[0]


def test_lossless_modes_and_cpus_are_not_checked() -> None:
    for found, calls, _ in ranks.run(checked, 2, ["triton"] * 2, ["bits"] * 2, "exact"):
        assert (found, calls) == ("auto", [])
    config = CocoDiffConfig(topology=Topology.flat(2), mode="balanced")
    with mock.patch.object(kernel_check.codec_check, "failure", side_effect=AssertionError):
        assert kernel_check.with_checked_kernels(config, None) is config
