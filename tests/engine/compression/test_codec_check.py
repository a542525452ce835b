"""The self-check: it passes the kernels of this machine, and finds each kind of mistake."""

import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from xfuser_cocodiff.engine.codec import kernels, torch_kernels
from xfuser_cocodiff.engine.codec.rows import Int8Rows, MessagePart
from xfuser_cocodiff.engine.compression import codec_check
from xfuser_cocodiff.engine.compression.default_mode import MODES

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def selected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Restore the kernels of this process after the test."""
    monkeypatch.setattr(kernels, "_selected", [kernels.AUTO])
    return kernels._selected


@pytest.fixture(autouse=True)
def device_kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Let a copy of PyTorch's kernels stand for those of a device, which a test may change."""
    spec = importlib.util.find_spec(torch_kernels.__name__)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    modules = {"triton_kernels": copy, "torch_kernels": torch_kernels}
    monkeypatch.setattr(kernels, "_module", modules.__getitem__)
    return copy


@pytest.mark.parametrize("mode", MODES[1:])
def test_kernels_that_compute_the_same_pass(mode: str, selected: list[str]) -> None:
    assert codec_check.failure(kernels.TRITON, mode, None, CPU, tokens=64) is None
    assert kernels._selected == [kernels.TRITON]


def flip_last_bit(rows: Int8Rows) -> None:
    """Flip the last bit of one value."""
    rows.levels.flatten()[-1] ^= 1


def shift(values: torch.Tensor, dim: int = -2) -> None:
    """Move each row to the next one, in place."""
    values.copy_(values.roll(1, dims=dim))


Mistake = Callable[[MessagePart, torch.Tensor | None], Any]
"""Changes what a kernel has written of a part; called with the part's energies if it encodes."""


def make(
    monkeypatch: pytest.MonkeyPatch,
    module: ModuleType,
    function: str,
    mistake: Mistake,
    where: Callable[[MessagePart], bool] = lambda part: True,
) -> None:
    """Make a mistake in the results of a function of the kernels, as a compiler would in one of two kernels.

    Args:
        monkeypatch: undoes it after the test.
        module: the kernels.
        function: "encode" or "decode".
        mistake: the mistake.
        where: which parts it is made in.
    """
    original = getattr(module, function)

    def wrong(parts: list[MessagePart], *energies: torch.Tensor) -> None:
        original(parts, *energies)
        for number, part in enumerate(parts):
            if where(part):
                mistake(part, energies[0][number] if energies else None)

    monkeypatch.setattr(module, function, wrong)


@pytest.mark.parametrize(
    ("function", "mistake", "words"),
    [
        ("decode", lambda part, _: flip_last_bit(part.new_reference), "sender and receiver have different references"),
        ("encode", lambda part, _: flip_last_bit(part.new_reference), "different references"),
        ("encode", lambda _, energies: energies[0].mul_(2), "errors"),
        ("encode", lambda part, _: part.prediction.gains.copy_(part.prediction.gains // 4), "gains"),
    ],
)
def test_single_bits_and_figures_are_found(
    monkeypatch: pytest.MonkeyPatch, device_kernels: ModuleType, function: str, mistake: Mistake, words: str
) -> None:
    """Make the mistake where residuals are coded."""
    extrapolates = lambda part: part.prediction.previous is not None  # noqa: E731
    make(monkeypatch, device_kernels, function, mistake, extrapolates)
    assert words in codec_check.failure(kernels.TRITON, "balanced", None, CPU, tokens=64)


def test_both_ends_with_the_same_mistake_differ_from_pytorch(
    monkeypatch: pytest.MonkeyPatch, device_kernels: ModuleType
) -> None:
    """Decode the next row's levels at both ends: references are equal, and wrong."""

    def wrong(part: MessagePart, energies: torch.Tensor | None) -> None:
        shift(part.new_reference.levels)
        shift(part.new_reference.codes, dim=-1)
        if energies is None:
            shift(part.values)

    for function in ("encode", "decode"):
        make(monkeypatch, device_kernels, function, wrong)
    reason = codec_check.failure(kernels.TRITON, "fast", None, CPU, tokens=64)
    assert "differ from those of PyTorch's kernels" in reason


@pytest.mark.parametrize("function", ["encode", "decode"])
def test_kernels_of_following_branches_are_checked(
    monkeypatch: pytest.MonkeyPatch, device_kernels: ModuleType, function: str
) -> None:
    """Make the mistake only where the difference to a leading branch is coded."""

    mistake: Mistake = lambda part, _: flip_last_bit(part.new_reference)  # noqa: E731
    make(monkeypatch, device_kernels, function, mistake, lambda part: part.base is not None)
    reason = codec_check.failure(kernels.TRITON, "balanced", None, CPU, tokens=64)
    assert reason.endswith("in a following branch")
    assert codec_check.failure(kernels.TRITON, "balanced", "joint=0", CPU, tokens=64) is None


def test_errors_of_a_compiler_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no launcher\nfor this driver")

    monkeypatch.setattr(kernels, "encode", fails)
    reason = codec_check.failure(kernels.TRITON, "balanced", None, CPU, tokens=64)
    assert reason == "RuntimeError: no launcher"
