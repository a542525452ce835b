"""Codec schedules: the codecs of each step, and the notation of changes."""

import pytest

from xfuser_cocodiff.engine.codec.codec import EXACT
from xfuser_cocodiff.engine.codec.quantize import GRIDS
from xfuser_cocodiff.engine.compression import modes
from xfuser_cocodiff.engine.compression.modes import CodecSchedule

LOSSY = "balanced", "fast"


def test_paper_mode_sends_fewer_tokens_at_each_step() -> None:
    steps = [modes.PAPER.codecs(step, 50) for step in range(50)]
    exact = [step for step, codecs in enumerate(steps) if codecs["v"].is_exact]
    assert exact == [0, 1, 11, 21, 31, 41]
    for step, codecs in enumerate(steps):
        assert codecs["q"] == codecs["k"] == codecs["v"]
        assert codecs["o"].is_exact and codecs["v"].bits is None
        if step not in exact:
            assert codecs["v"].token_fraction == pytest.approx(1 - step / 49)
    assert steps[49]["v"].token_fraction == 0


@pytest.mark.parametrize("mode", LOSSY)
def test_all_tensors_of_a_step_have_the_bits_that_rate_control_chooses(mode: str) -> None:
    schedule = modes.PRESETS[mode]
    for bits in GRIDS:
        codecs = schedule.codecs(1, 20, bits)
        assert {codec.bits for codec in codecs.values()} == {bits}
        assert all(codec.predicts and not codec.is_keyframe for codec in codecs.values())
    assert {(codec.bits, codec.is_keyframe) for codec in schedule.codecs(0, 20, 2).values()} == {(8, True)}


def test_overrides_keep_the_rest_of_a_mode() -> None:
    changed = CodecSchedule.parse("first=4", modes.BALANCED)
    assert (changed.first, changed.error, changed.joint) == (4, modes.BALANCED.error, modes.BALANCED.joint)
    assert CodecSchedule.parse("error=0.05", modes.FAST).error == 0.05
    fixed = CodecSchedule.parse("bits=4", modes.BALANCED)
    assert fixed.error is None and {codec.bits for codec in fixed.codecs(5, 50).values()} == {4}
    lossless = CodecSchedule.parse("first=exact,bits=exact", modes.BALANCED)
    assert all(codec.is_exact for step in (0, 5) for codec in lossless.codecs(step, 50).values())
    assert CodecSchedule().codecs(5, 10)["v"] == EXACT


BITS = "1, 1.6, 2, 2.7, 3.2, 4, 5.3, 8, and exact"


@pytest.mark.parametrize(
    ("mode", "overrides", "message"),
    [
        ("balanced", "", "has the unknown key ''; valid are error, bits, warmup, first, predictor, joint: "),
        ("balanced", "bits=4->2", f"'4->2' is not valid for bits; valid are {BITS}"),
        ("balanced", "error=0", "'0' is not valid for error; valid are numbers above 0, up to 1"),
        ("balanced", "error=0.05,bits=2", "has 'bits' and 'error'; valid is one of them"),
        ("balanced", "predictor=0.5", "'0.5' is not valid for predictor; valid are 0 and 1"),
        ("balanced", "warmup=-1", "'-1' is not valid for warmup; valid are numbers of steps from 0"),
        ("balanced", "bits=2,bits=4", "has 'bits' twice"),
        ("balanced", "bits_o=2", "has 'bits_o', which no longer exists; use bits for all tensors, or error"),
        ("paper", "bits=2", "has the unknown key 'bits'; valid are warmup, refresh, cached: "),
        ("paper", "cached=2", "'2' is not valid for cached; valid are fractions from 0 to 1, or two of them as 0->0.5"),
        ("paper", "refresh=often", "'often' is not valid for refresh; valid are numbers of steps from 1, and 0 for"),
    ],
)
def test_errors_name_the_key_and_its_valid_values(mode: str, overrides: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"valid|no longer exists") as caught:
        CodecSchedule.parse(overrides, modes.PRESETS[mode])
    assert message in str(caught.value)
