"""Codec schedules: the codecs of each step, and the notation of changes."""

from dataclasses import replace

import pytest

from xfuser_cocodiff.engine.compression import modes
from xfuser_cocodiff.engine.compression.codec import CHANGE, EXACT
from xfuser_cocodiff.engine.compression.modes import CodecSchedule


def test_paper_mode_sends_fewer_tokens_at_each_step() -> None:
    steps = [modes.PAPER.codecs(step, 50) for step in range(50)]
    exact = [step for step, codecs in enumerate(steps) if codecs["v"].is_exact]
    assert exact == [0, 1, 11, 21, 31, 41]
    for step, codecs in enumerate(steps):
        assert codecs["q"] == codecs["k"] == codecs["v"]
        assert codecs["o"].is_exact
        if step not in exact:
            assert codecs["v"].score == CHANGE
            assert codecs["v"].token_fraction == pytest.approx(1 - step / 49)
    assert steps[49]["v"].token_fraction == 0


def test_parse_and_str_are_inverse() -> None:
    schedule = CodecSchedule.parse(
        "warmup=2,refresh=4,cached=0.2->0.6,bits=4->2,bits_o=1,predictor=0.5,exact=blocks.0+last", CodecSchedule()
    )
    assert CodecSchedule.parse(str(schedule), CodecSchedule()) == schedule
    assert [schedule.is_keyframe_step(step) for step in range(11)] == [step in (0, 1, 5, 9) for step in range(11)]
    first, last = schedule.codecs(2, 11), schedule.codecs(10, 11)
    assert (first["k"].bits, last["k"].bits) == (4, 2)
    assert (first["k"].token_fraction, last["k"].token_fraction) == pytest.approx((0.72, 0.4))
    assert (last["o"].bits, last["o"].token_fraction, last["o"].predictor) == (1, 1, 0.5)
    assert schedule.codecs(5, 11)["v"] == schedule.codecs(0, 11)["o"]
    assert schedule.codecs(5, 11)["v"].is_exact and schedule.codecs(5, 11)["v"].predictor == 0.5
    assert [schedule.is_lossless_layer(name) for name in ("blocks.0.attn", "blocks.01.attn", "last", "first")] == [
        *(True, False, True, False)
    ]


def test_overrides_keep_the_rest_of_a_mode() -> None:
    changed = CodecSchedule.parse("refresh=7", modes.BALANCED)
    assert (changed.refresh, changed.bits) == (7, modes.BALANCED.bits)
    assert str(CodecSchedule()) == "exact"
    lossless = CodecSchedule.parse("first=exact,bits=exact,bits_o=exact", modes.BALANCED)
    assert all(codec.is_exact for step in (0, 5) for codec in lossless.codecs(step, 50).values())
    # `bits` sets Q, K and V, except for those that have bits of their own.
    same, other = (CodecSchedule.parse(text, modes.BALANCED).codecs(5, 50) for text in ("bits=4", "bits_k=8,bits=4"))
    assert [same[name].bits for name in "qkvo"] == [4, 4, 4, 2.7]
    assert [other[name].bits for name in "qkvo"] == [4, 8, 4, 2.7]
    assert CodecSchedule().codecs(5, 10)["v"] == EXACT


@pytest.mark.parametrize("tensor", ["q", "k", "v", "o"])
def test_a_tensor_of_its_own_is_lossless(tensor: str) -> None:
    schedule = CodecSchedule.parse(f"bits_{tensor}=exact", modes.BALANCED)
    for step in (5, 45):
        assert [name for name, codec in schedule.codecs(step, 50).items() if codec.is_exact] == [tensor]
    assert CodecSchedule.parse(str(schedule), CodecSchedule()) == schedule


@pytest.mark.parametrize("mode", ["balanced", "fast"])
def test_runs_of_few_steps_have_more_bits(mode: str) -> None:
    few, many = (modes.preset(mode, total).codecs(5, total)["v"] for total in (8, 50))
    assert few.bits * few.token_fraction > many.bits * many.token_fraction
    assert modes.preset("exact", 50) is None


@pytest.mark.parametrize("mode", ["balanced", "fast"])
def test_very_few_steps_with_guidance_have_more_bits(mode: str) -> None:
    """Guidance amplifies errors that differ between branches, and only there."""
    codecs = [modes.preset(mode, 4, is_guided).codecs(1, 4) for is_guided in (False, True)]
    unguided, guided = (sum(of_mode[name].bits for name in "kv") for of_mode in codecs)
    assert unguided < guided
    guided_long, unguided_long = (replace(modes.preset(mode, 50, is_guided), first=8) for is_guided in (True, False))
    assert guided_long == unguided_long  # but for bits of the keyframe


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("", "has the unknown key ''; valid are 'warmup=2,"),
        ("bits", "'' is not valid for bits; valid are "),
        ("bits=4->3", "'4->3' is not valid for bits; valid are 1, 1.6, 2, 2.7, 4, 8, two of them as 4->2, and exact"),
        (
            "bits=4,bits_o=3",
            "'3' is not valid for bits_o; valid are 1, 1.6, 2, 2.7, 4, 8, two of them as 4->2, and exact",
        ),
        ("cached=2", "'2' is not valid for cached; valid are fractions from 0 to 1, or two of them as 0->0.5"),
        ("warmup=-1", "'-1' is not valid for warmup; valid are numbers of steps from 0"),
        ("refresh=often", "'often' is not valid for refresh; valid are numbers of steps from 1, and 0 for never"),
        ("score=best", "'best' is not valid for score; valid are drift, change, random"),
        ("predictor=nan", "'nan' is not valid for predictor; valid are fractions from 0 to 1, and auto"),
        ("exact=a++b", "'a++b' is not valid for exact; valid are prefixes of layer names, joined by +"),
        ("bits=2,bits=4", "has 'bits' twice"),
        ("bites=2", "has the unknown key 'bites'; valid are 'warmup=2,"),
    ],
)
def test_errors_name_the_key_and_its_valid_values(overrides: str, message: str) -> None:
    with pytest.raises(ValueError, match="valid") as caught:
        CodecSchedule.parse(overrides, modes.BALANCED)
    assert message in str(caught.value)


def test_names_that_match_no_layer_are_reported() -> None:
    layers = ["blocks.0.attn", "blocks.1.attn", "single_blocks.0.attn"]
    schedule = CodecSchedule.parse("exact=blocks.0 + nolayer.7+single_blocks.0.attn+blocks.1.att", modes.BALANCED)
    assert schedule.unmatched_layers(layers) == ["nolayer.7", "blocks.1.att"]
    assert modes.BALANCED.unmatched_layers(layers) == []
    assert all(
        schedule.is_lossless_layer(layer) for layer in (layers[0], layers[2])
    ) and not schedule.is_lossless_layer(layers[1])


@pytest.mark.parametrize("mode", ["balanced", "fast"])
@pytest.mark.parametrize("total", [1, 4, 8, 20, 40, 50, None])
def test_schedules_with_guidance_have_the_same_keyframe(mode: str, total: int | None) -> None:
    """Whether a run has several branches is known only after its first step."""
    first, guided = (modes.preset(mode, total, is_guided) for is_guided in (False, True))
    assert first.keyframe_codec.bits == guided.keyframe_codec.bits and first.warmup == guided.warmup == 1
