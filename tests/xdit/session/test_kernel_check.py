"""Kernels that fail their self-check on one rank are replaced on all ranks, with one warning."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from xfuser_cocodiff.engine import kernels
from xfuser_cocodiff.engine.settings.config import CocoDiffConfig
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.session import kernel_check

FORMAT = kernel_check.ValueFormat(64, torch.float16)


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
        used = kernel_check.with_checked_kernels(config, dist.group.WORLD, FORMAT).kernels
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
        assert calls == ([("triton", "balanced", "bits=4", FORMAT)] if backends[rank] == "triton" else [])
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


@pytest.mark.parametrize(
    ("values", "head_dim"),
    [
        ({"attention_head_dim": 64, "hidden_size": 100, "num_attention_heads": 1}, 64),
        ({"head_dim": 80}, 80),
        ({"hidden_size": 2304, "num_attention_heads": 24}, 96),  # Lumina 2
        ({"dim": 3840, "n_heads": 30}, 128),  # Z-Image
        ({"attention_head_dim": (8, 8)}, 128),
        ({}, 128),
    ],
)
def test_kernels_are_checked_for_the_values_of_the_model(values: dict, head_dim: int) -> None:
    transformer = SimpleNamespace(config=SimpleNamespace(**values), dtype=torch.float16)
    assert kernel_check.value_format(SimpleNamespace(transformer=transformer)) == (head_dim, torch.float16)


def test_kernels_are_checked_for_usual_values_without_a_transformer() -> None:
    for pipeline in (None, SimpleNamespace(), SimpleNamespace(transformer=torch.nn.Identity())):
        assert kernel_check.value_format(pipeline) == (128, torch.bfloat16)
