"""Schedules of codecs: what each step of a run uses."""

import pytest

from xfuser_cocodiff.engine.compression import modes
from xfuser_cocodiff.engine.compression.codecs import CHANGE, EXACT
from xfuser_cocodiff.engine.compression.modes import CodecSchedule


def test_what_the_paper_does() -> None:
    steps = [modes.PAPER.codecs(step, 50) for step in range(50)]
    exact = [step for step, codecs in enumerate(steps) if codecs["v"].is_exact]
    assert exact == [0, 1, 11, 21, 31, 41]
    for step, codecs in enumerate(steps):
        assert codecs["q"] == codecs["k"] == codecs["v"]
        assert codecs["o"].is_exact
        if step not in exact:
            assert codecs["v"].score == CHANGE
            assert codecs["v"].share == pytest.approx(1 - step / 49)
    assert steps[49]["v"].share == 0


def test_a_schedule_says_what_it_says() -> None:
    schedule = CodecSchedule.parse(
        "warmup=2,refresh=4,cached=0.2->0.6,bits=4->2,bits_o=1,predictor=0.5,exact=blocks.0+last", CodecSchedule()
    )
    assert CodecSchedule.parse(str(schedule), CodecSchedule()) == schedule
    assert [schedule.is_keyframe_step(step) for step in range(11)] == [step in (0, 1, 5, 9) for step in range(11)]
    first, last = schedule.codecs(2, 11), schedule.codecs(10, 11)
    assert (first["k"].bits, last["k"].bits) == (4, 2)
    assert (first["k"].share, last["k"].share) == pytest.approx((0.72, 0.4))
    assert (last["o"].bits, last["o"].share, last["o"].predictor) == (1, 1, 0.5)
    assert schedule.codecs(5, 11)["v"] == schedule.codecs(0, 11)["o"]
    assert schedule.codecs(5, 11)["v"].is_exact and schedule.codecs(5, 11)["v"].predictor == 0.5
    assert [schedule.leaves_out(name) for name in ("blocks.0.attn", "blocks.01.attn", "last", "first")] == [
        *(True, False, True, False)
    ]


def test_changes_leave_the_rest_of_a_mode_as_it_is() -> None:
    changed = CodecSchedule.parse("refresh=7", modes.BALANCED)
    assert (changed.refresh, changed.bits) == (7, modes.BALANCED.bits)
    assert str(CodecSchedule()) == "exact"
    # Bits of Q, K and V are those of all three, as far as none of them has its own.
    same, other = (CodecSchedule.parse(text, modes.BALANCED).codecs(5, 50) for text in ("bits=4", "bits_k=8,bits=4"))
    assert [same[name].bits for name in "qkvo"] == [4, 4, 4, 2.7]
    assert [other[name].bits for name in "qkvo"] == [4, 8, 4, 2.7]
    assert CodecSchedule().codecs(5, 10)["v"] == EXACT


@pytest.mark.parametrize("mode", ["balanced", "fast"])
def test_few_steps_get_more_bits(mode: str) -> None:
    few, many = (modes.preset(mode, total).codecs(5, total)["v"] for total in (8, 50))
    assert few.bits * few.share > many.bits * many.share
    assert modes.preset("exact", 50) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("", "names ''; valid are 'warmup=2,"),
        ("bits", "'' is not valid for bits; valid are "),
        ("bits=4->3", "'4->3' is not valid for bits; valid are 1, 1.6, 2, 2.7, 4, 8, or two of them as 4->2"),
        ("bits=4,bits_o=3", "'3' is not valid for bits_o; valid are 1, 1.6, 2, 2.7, 4, 8, or two of them as 4->2"),
        ("cached=2", "'2' is not valid for cached; valid are shares from 0 to 1, or two of them as 0->0.5"),
        ("warmup=-1", "'-1' is not valid for warmup; valid are numbers of steps from 0"),
        ("refresh=often", "'often' is not valid for refresh; valid are numbers of steps from 1, and 0 for never"),
        ("score=best", "'best' is not valid for score; valid are drift, change, random"),
        ("predictor=nan", "'nan' is not valid for predictor; valid are shares from 0 to 1, and auto"),
        ("exact=a++b", "'a++b' is not valid for exact; valid are beginnings of layers' names, joined by +"),
        ("bits=2,bits=4", "names 'bits' twice"),
        ("bites=2", "names 'bites'; valid are 'warmup=2,"),
    ],
)
def test_errors_say_what_is_valid_for_the_name(changes: str, words: str) -> None:
    with pytest.raises(ValueError, match="valid") as caught:
        CodecSchedule.parse(changes, modes.BALANCED)
    assert words in str(caught.value)


def test_names_that_are_no_layers_are_found() -> None:
    layers = ["blocks.0.attn", "blocks.1.attn", "single_blocks.0.attn"]
    schedule = CodecSchedule.parse("exact=blocks.0 + nolayer.7+single_blocks.0.attn+blocks.1.att", modes.BALANCED)
    assert schedule.unmatched(layers) == ["nolayer.7", "blocks.1.att"]
    assert modes.BALANCED.unmatched(layers) == []
    assert all(schedule.leaves_out(layer) for layer in (layers[0], layers[2])) and not schedule.leaves_out(layers[1])
