"""The self-check: it passes the kernels of this machine, and finds each kind of mistake."""

import importlib.util
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.quick import slow_but
from xfuser_cocodiff.engine import kernels
from xfuser_cocodiff.engine.compression import codec_check, codecs, link_reference, message
from xfuser_cocodiff.engine.compression.bit_allocation import NOT_SENT, BitAllocation
from xfuser_cocodiff.engine.compression.codec import Codec
from xfuser_cocodiff.engine.compression.message import Message
from xfuser_cocodiff.engine.kernels import torch_kernels
from xfuser_cocodiff.engine.settings.options import MODES

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


@pytest.mark.parametrize("mode", slow_but(["balanced", "fast"], MODES[1:]))
def test_kernels_that_compute_the_same_pass(mode: str, selected: list[str]) -> None:
    assert codec_check.failure(kernels.TRITON, mode, None, CPU, tokens=64) is None
    assert kernels._selected == [kernels.TRITON]


def test_values_of_the_model_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, found = Message.encode, set()

    def encode(self: Message) -> torch.Tensor:
        found.update((values.shape[-1], values.dtype) for values in self.values)
        return sent(self)

    monkeypatch.setattr(Message, "encode", encode)
    for values in (codec_check.ValueFormat(72, torch.float16), codec_check.ValueFormat(32, torch.float32)):
        found.clear()
        assert codec_check.failure(kernels.TRITON, "fast", None, CPU, values, tokens=64) is None
        assert found == {values}


def test_codecs_of_refreshed_steps_and_of_auto_are_checked() -> None:
    def checked(mode: str, overrides: str | None) -> set[Codec]:
        return {codec for run in codec_check._runs(mode, overrides) for each in run.steps for codec in each.values()}

    assert not any(codec.is_exact for codec in checked("balanced", None))
    assert any(codec.is_exact for codec in checked("balanced", "refresh=9"))
    assert {codec.bits for codec in checked("auto", None)} >= {4.0, 8.0, None}


def test_bits_of_all_layers_of_a_tuned_schedule_are_checked(tmp_path: Path) -> None:
    layers = {"a": dict.fromkeys("qkvo", (2, 4)), "b": {**dict.fromkeys("qkv", (1.6, NOT_SENT)), "o": (None, 1)}}
    file = tmp_path / "tuned.json"
    file.write_text(json.dumps(BitAllocation((0.0, 0.5), layers, 8, 0.5, 50, "model", "test").to_json()))
    runs = list(codec_check._runs("balanced", f"@{file}"))
    checked = {(codec.bits, codec.sends_nothing) for run in runs for each in run.steps for codec in each.values()}
    assert checked == {(8, False), (2, False), (4, False), (1.6, False), (None, True), (None, False), (1, False)}


def flip_last_bit(values: torch.Tensor) -> torch.Tensor:
    """Flip the last bit of one value."""
    values.view(torch.int16).flatten()[-1] ^= 1
    return values


def shift(values: torch.Tensor) -> torch.Tensor:
    return values.copy_(values.roll(1, dims=3))


@pytest.mark.parametrize(
    ("function", "mistake", "words"),
    [
        ("decode", flip_last_bit, "sender and receiver have different references"),
        ("encode", lambda result: result._replace(reference=flip_last_bit(result.reference)), "different references"),
        ("encode", lambda result: result._replace(error_energy=result.error_energy * 2), "errors"),
        ("encode", lambda result: result._replace(gains=result.gains // 4), "gains"),
    ],
)
def test_single_bits_and_figures_are_found(
    monkeypatch: pytest.MonkeyPatch, device_kernels: ModuleType, function: str, mistake: Callable, words: str
) -> None:
    """Make the mistake where residuals are coded, as a compiler would in one of two kernels."""
    original = getattr(device_kernels, function)

    def wrong(values: torch.Tensor, prediction: object, *rest: object) -> object:
        result = original(values, prediction, *rest)
        return mistake(result) if prediction is not None and prediction.previous is not None else result

    monkeypatch.setattr(device_kernels, function, wrong)
    assert words in codec_check.failure(kernels.TRITON, "balanced", None, CPU, tokens=64)


def test_both_ends_with_the_same_mistake_differ_from_pytorch(
    monkeypatch: pytest.MonkeyPatch, device_kernels: ModuleType
) -> None:
    """Decode the next row's levels at both ends: references are equal, and wrong."""
    for name in ("encode", "decode"):
        original = getattr(device_kernels, name)

        def wrong(first: torch.Tensor, *rest: object, original: Callable = original, name: str = name) -> object:
            result = original(first, *rest)
            if name == "encode":
                return result._replace(reference=shift(result.reference))
            rest[3].copy_(rest[3].roll(1, dims=3))  # the target
            return shift(result)

        monkeypatch.setattr(device_kernels, name, wrong)
    reason = codec_check.failure(kernels.TRITON, "fast", None, CPU, tokens=64)
    assert "differ from those of PyTorch's kernels" in reason


@pytest.mark.parametrize("function", ["scores", "encode", "decode"])
def test_kernels_of_following_branches_are_checked(
    monkeypatch: pytest.MonkeyPatch, device_kernels: ModuleType, function: str
) -> None:
    """Make the mistake only where the difference to a leading branch is coded."""
    original = getattr(device_kernels, function)

    def wrong(*arguments: object) -> object:
        result = original(*arguments)
        if arguments[-1] is None:
            return result
        if function == "encode":
            return result._replace(reference=flip_last_bit(result.reference))
        return -result if function == "scores" else flip_last_bit(result)

    monkeypatch.setattr(device_kernels, function, wrong)
    reason = codec_check.failure(kernels.TRITON, "balanced", "cached=0.5,joint=1", CPU, tokens=64)
    assert reason.endswith("in a following branch")
    assert codec_check.failure(kernels.TRITON, "balanced", "cached=0.5,joint=0", CPU, tokens=64) is None


@pytest.mark.parametrize("names", ["qkv", "o", "v", "qk", "kv"])
def test_kernels_of_each_message_are_checked(monkeypatch: pytest.MonkeyPatch, names: str) -> None:
    """Kernels are compiled for the codecs of all tensors of a message: make the mistake in one message only."""
    original, sent = message.codecs.encode, Message.encode

    def encode(self: Message) -> torch.Tensor:
        def wrong(tensors: list) -> list:
            found = original(tensors)
            if self.names == names and tensors[0].reference.has_values:
                tensors[0].reference._current = (-tensors[0].reference.predict(),)
            return found

        monkeypatch.setattr(message.codecs, "encode", wrong)
        return sent(self)

    monkeypatch.setattr(Message, "encode", encode)
    reason = codec_check.failure(kernels.TRITON, "balanced", None, CPU, tokens=64)
    assert reason.startswith(tuple(name.upper() for name in names)) and "different references" in reason


def test_int8_references_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round differently at one of two ends: conversions alternate between them."""
    original, calls = link_reference.to_int8, itertools.count()

    def wrong(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        levels, codes = original(values)
        return levels + next(calls) % 2, codes

    monkeypatch.setattr(link_reference, "to_int8", wrong)
    reason = codec_check.failure(kernels.TRITON, "balanced", "joint=0", CPU, tokens=64)
    assert reason.endswith("sender and receiver have different references, int8 references")


def test_errors_of_a_compiler_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no launcher\nfor this driver")

    monkeypatch.setattr(codecs.kernels, "encode", fails)
    reason = codec_check.failure(kernels.TRITON, "balanced", None, CPU, tokens=64)
    assert reason == "RuntimeError: no launcher"
