"""Precisions of mode `auto`: their codecs and bytes, and that references stay valid when they change."""

import pytest
import torch

from tests.engine.compression.test_runtime import SIZES, partition_on
from xfuser_cocodiff.engine.compression import codecs, modes
from xfuser_cocodiff.engine.compression.codec import Codec
from xfuser_cocodiff.engine.compression.link_reference import LinkReference
from xfuser_cocodiff.engine.compression.modes import CodecSchedule
from xfuser_cocodiff.engine.compression.precisions import (
    LOSSLESS,
    SCHEDULED,
    LayerKind,
    at_precision,
    kind_name,
    precisions_of,
    sent_fraction,
)
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes
from xfuser_cocodiff.engine.compression.runtime import CodecRuntime


@pytest.mark.parametrize(
    ("overrides", "total", "expected"),
    [
        (None, 50, (SCHEDULED, 4.0, 8.0, LOSSLESS)),
        (None, None, (SCHEDULED, 4.0, 8.0, LOSSLESS)),
        (None, 8, (SCHEDULED, 4.0, 8.0, LOSSLESS)),
        ("bits=4->2", 50, (SCHEDULED, 8.0, LOSSLESS)),
        ("bits_o=8", 50, (SCHEDULED, 8.0, LOSSLESS)),
        ("bits=8,bits_v=2.7", 50, (SCHEDULED, 8.0, LOSSLESS)),
        ("bits=8,bits_o=2.7", 50, (SCHEDULED, LOSSLESS)),
    ],
)
def test_precisions_are_the_schedules_own_and_those_above_it(
    overrides: str | None, total: int | None, expected: tuple[float, ...]
) -> None:
    schedule = modes.preset("auto", total)
    assert schedule == modes.preset("balanced", total)
    assert precisions_of(CodecSchedule.parse(overrides, schedule) if overrides else schedule, total) == expected


def test_no_tensor_gets_fewer_bits_or_tokens() -> None:
    schedule = CodecSchedule.parse("cached=0.5,bits_k=8,exact=last", modes.BALANCED)
    own = schedule.codecs(5, 50)
    for precision in (SCHEDULED, 4.0, LOSSLESS):
        raised = {name: at_precision(codec, precision) for name, codec in own.items()}
        for name, codec in own.items():
            assert (raised[name].bits or 32) >= codec.bits and raised[name].token_fraction >= codec.token_fraction
            assert raised[name].predictor == codec.predictor
        assert (raised == own) == (precision == SCHEDULED)
        assert all(codec.is_exact for codec in raised.values()) == (precision == LOSSLESS)
    keyframe = schedule.keyframe_codec
    assert [at_precision(keyframe, each).is_keyframe for each in (SCHEDULED, 4.0, 8.0, LOSSLESS)] == [True] * 3 + [
        False
    ]
    assert at_precision(keyframe, 4.0) == keyframe and at_precision(keyframe, LOSSLESS).is_exact


@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("precision", [4.0, 8.0, LOSSLESS])
def test_predicted_bytes_are_those_of_messages(precision: float, dim: int) -> None:
    schedule = modes.preset("balanced", 50)
    raised = {name: at_precision(codec, precision) for name, codec in schedule.codecs(5, 50).items()}
    shapes = [(1, 2, 3, 4096, dim)] * 3
    exact = 3 * torch.Size(shapes[0]).numel() * 2
    sent = modes.link_bytes(raised, "qkv", shapes, torch.bfloat16)
    assert sent_fraction(precision, LayerSizes(4, 1, dim, 2)) == pytest.approx(sent / exact, rel=1e-3)


@pytest.mark.parametrize("is_int8", [False, True])
def test_references_stay_equal_and_valid_whatever_the_precisions(is_int8: bool) -> None:
    """Change precisions in each step without a keyframe; both ends decode the same, at the error of their bits."""
    own, shape = modes.BALANCED.codecs(5, 50)["k"], (1, 1, 2, 64, 64)
    sent, received = LinkReference(is_int8), LinkReference(is_int8)
    generator = torch.Generator().manual_seed(7)
    first, change = (torch.randn(shape, generator=generator) for _ in range(2))
    errors: dict[float, list[float]] = {}
    order = [LOSSLESS, SCHEDULED, LOSSLESS, 4.0, SCHEDULED, 8.0, LOSSLESS, LOSSLESS, SCHEDULED, 4.0, 8.0, SCHEDULED]
    for step, precision in enumerate(order):
        values, codec = first + 0.02 * step * change, at_precision(own, precision)
        payload, found = torch.empty(1, codec.payload_bytes(shape, values.dtype), dtype=torch.uint8), values.clone()
        codecs.encode([codecs.CodedTensor(values, sent, codec, None, payload)])
        codecs.decode([codecs.CodedTensor(found, received, codec, None, payload)])
        assert torch.equal(sent.predict(), received.predict())
        errors.setdefault(precision, []).append(float((found - values).norm() / values.norm()))
    assert errors[LOSSLESS] == [0.0] * 4
    assert max(errors[SCHEDULED]) < 0.03  # a keyframe of two bits alone would have an error of 0.3


def test_the_runtime_applies_the_precision_of_each_kind() -> None:
    runtime = CodecRuntime(partition_on("cpu"), "auto", None, list)
    seen: list[LayerKind] = []

    def precision_of(kind: LayerKind) -> float:
        seen.append(kind)
        return LOSSLESS if kind.name == "single.*.attn" else SCHEDULED

    runtime.precision_of = precision_of
    runtime.begin_run(20)
    for step in range(3):
        for number, name in enumerate(["blocks.0.attn", "blocks.1.attn", "single.0.attn"]):
            layer_codecs = runtime.layer_codecs(name, number, 0, SIZES)
            assert layer_codecs.is_keyframe == (step == 0)
            layer_codecs.stats.sent_bytes += 3
            layer_codecs.stats.exact_bytes += 10
            expected = modes.BALANCED.codecs(step, 20)["o"] if number < 2 else Codec(predictor="auto")
            assert layer_codecs.codecs["o"] == expected
            assert layer_codecs.keyframe_codec.is_exact == (number == 2)
        runtime.end_step()
        load = runtime.take_load()
        assert load.is_representative == (step > 0) and runtime.take_load() is None
        assert {kind.name: (each.calls, each.sent_bytes, each.exact_bytes) for kind, each in load.kinds.items()} == {
            "blocks.*.attn": (2, 6, 20),
            "single.*.attn": (1, 3, 10),
        }
    assert {kind.precisions for kind in seen} == {(SCHEDULED, 4.0, 8.0, LOSSLESS)} and len({*seen}) == 2


def test_layers_of_a_stack_are_of_one_kind() -> None:
    assert kind_name("blocks.11.attn1") == kind_name("blocks.3.attn1") != kind_name("single_blocks.3.attn1")
