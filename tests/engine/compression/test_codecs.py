"""Codecs on one link: both ends have the same reference, and errors do not accumulate."""

import itertools

import pytest
import torch

from tests.quick import pairwise, slow_but
from xfuser_cocodiff.engine.compression import codecs
from xfuser_cocodiff.engine.compression.active_tokens import pack_active, select_tokens, unpack_active
from xfuser_cocodiff.engine.compression.codec import CHANGE, DRIFT, EXACT, RANDOM, SCORES, Codec, section_bytes
from xfuser_cocodiff.engine.compression.link_reference import ADAPTIVE, LinkReference
from xfuser_cocodiff.engine.kernels import quantize, rows
from xfuser_cocodiff.engine.kernels.quantize import GRIDS, channel_scales

SHAPE = (2, 3, 4, 10, 16)
"""Links, groups, heads, tokens, head dim."""
LOSSY = [
    Codec(bits, token_fraction, score, predictor)
    for bits, token_fraction, score, predictor in itertools.product(
        (None, *GRIDS), (1.0, 0.5), SCORES, (0.0, 0.5, ADAPTIVE)
    )
    if (bits or token_fraction < 1) and (token_fraction < 1 or score == DRIFT)
]
DRIFTING = slow_but(
    [
        Codec(8),
        Codec(2, predictor=ADAPTIVE),
        Codec(1.6, predictor=0.5),
        Codec(1, 0.5),
        Codec(None, 0.5, predictor=0.5),
    ],
    [c for c in LOSSY if c.score == DRIFT],
)


class Link:
    """Both ends of a link."""

    def __init__(self, is_int8: bool = False) -> None:
        self.sent, self.received = LinkReference(is_int8), LinkReference(is_int8)

    def send(self, values: torch.Tensor, codec: Codec, seed: int = 0) -> torch.Tensor:
        """Return values as the receiver decodes them, from the sections of a message only."""
        links, groups, _, tokens, _ = values.shape
        mask_bytes, payload_bytes = section_bytes(codec, "v", values.shape, values.dtype)
        active = received_active = None
        if codec.selects_tokens:
            active = select_tokens(values, self.sent, codec, seed)
            mask = torch.empty(links, mask_bytes, dtype=torch.uint8)
            pack_active(active, mask)
            received_active = unpack_active(mask, groups, tokens, codec.num_active(tokens))
        payload = torch.empty(links, payload_bytes, dtype=torch.uint8)
        codecs.encode([codecs.CodedTensor(values, self.sent, codec, active, payload)])
        received = torch.empty_like(values)
        codecs.decode([codecs.CodedTensor(received, self.received, codec, received_active, payload)])
        return received


def random_walk(dtype: torch.dtype = torch.float32, pace: float = 0.05, steps: int = 100) -> list[torch.Tensor]:
    """Return values that change a little at each step."""
    generator = torch.Generator().manual_seed(7)
    values, found = torch.randn(SHAPE, generator=generator), []
    for _ in range(steps):
        found.append(values.to(dtype))
        values = values + pace * torch.randn(SHAPE, generator=generator)
    return found


def relative_error(received: torch.Tensor, values: torch.Tensor) -> float:
    """Return the relative error of received values."""
    return ((received.float() - values.float()).norm() / values.float().norm()).item()


def errors_of(link: Link, codec: Codec, course: list[torch.Tensor]) -> list[float]:
    """Return the relative error at each step, of which the first is lossless."""
    return [relative_error(link.send(values, codec if step else EXACT), values) for step, values in enumerate(course)]


@pytest.mark.parametrize(
    ("bits", "token_fraction", "score", "predictor", "dtype", "is_int8"),
    pairwise(
        (codec.bits, codec.token_fraction, codec.score, codec.predictor, dtype, is_int8)
        for codec in LOSSY
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for is_int8 in (False, True)
    ),
    ids=str,
)
def test_both_ends_have_the_same_reference_after_100_steps(
    bits: float | None, token_fraction: float, score: str, predictor: float | str, dtype: torch.dtype, is_int8: bool
) -> None:
    link, codec = Link(is_int8), Codec(bits, token_fraction, score, predictor)
    for step, values in enumerate(random_walk(dtype)):
        found = link.send(values, codec if step else EXACT, seed=step)
        assert found.dtype == dtype
        assert torch.equal(link.sent.predict(), link.received.predict())
        assert torch.equal(link.sent.predict(0.5), link.received.predict(0.5))
        assert is_int8 or torch.equal(found, link.received.predict())


@pytest.mark.parametrize("first", [EXACT, Codec(8, is_keyframe=True), Codec(4, is_keyframe=True)], ids=str)
@pytest.mark.parametrize("is_int8", [False, True])
def test_large_channels_do_not_add_to_the_errors_of_others(first: Codec, is_int8: bool) -> None:
    """A channel 16 times as large adds less than 2.5 times the error of others, and both ends agree."""
    codec, errors = Codec(2, predictor=ADAPTIVE), {}
    for factor in (1, 16):
        link, errors[factor] = Link(is_int8), []
        for step, values in enumerate(random_walk(steps=40)):
            values[..., 3] *= factor
            found = link.send(values, codec if step else first)
            assert torch.equal(link.sent.predict(0.5), link.received.predict(0.5))
            errors[factor].append(relative_error(*(torch.cat([x[..., :3], x[..., 4:]], -1) for x in (found, values))))
    plain, large = (sum(errors[factor][20:]) for factor in (1, 16))
    assert large < 2.5 * plain, "without scales 8 times as much"


def test_scales_are_computed_only_for_residuals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lossless messages, such as all of a mode without bits, do not read their values once more."""
    computed: list[torch.Tensor] = []
    monkeypatch.setattr(quantize, "channel_scales", lambda values: computed.append(values) or channel_scales(values))
    link = Link()
    for codec, count in ((EXACT, 0), (EXACT, 0), (Codec(None, 0.5), 0), (Codec(2), 2), (Codec(2), 2), (EXACT, 2)):
        link.send(random_walk(steps=1)[0], codec)
        assert len(computed) == count, codec


def test_exact_codec_is_lossless_and_sets_the_reference() -> None:
    link = Link()
    values = random_walk(torch.bfloat16, steps=1)[0]
    assert not link.sent.fits(values.shape, values.dtype)
    assert torch.equal(link.send(values, EXACT), values)
    assert link.sent.fits(values.shape, values.dtype)
    assert not link.sent.fits(values[:, :2].shape, values.dtype) and not link.sent.fits(values.shape, torch.float32)


@pytest.mark.parametrize("codec", DRIFTING, ids=str)
def test_constant_values_converge(codec: Codec) -> None:
    """Reach a constant from any reference, by error feedback."""
    link = Link()
    start, end = random_walk(pace=1.0, steps=2)
    link.send(start, EXACT)
    errors = [relative_error(link.send(end, codec), end) for _ in range(400)]
    assert errors[0] > 1e-3
    assert errors[-1] < 1e-3 * errors[0]


@pytest.mark.parametrize("codec", DRIFTING, ids=str)
def test_errors_do_not_accumulate(codec: Codec) -> None:
    """Keep the error at the level of the first steps."""
    link = Link()
    errors = [
        relative_error(link.send(values, codec if step else EXACT), values) for step, values in enumerate(random_walk())
    ]
    assert max(errors[50:]) < 1.5 * max(errors[5:50])
    # Without error feedback, the error would grow with the root of the number of steps.
    assert max(errors) < 0.5 * 0.05 * 100**0.5


def test_error_decreases_with_bits_and_tokens() -> None:
    def error(codec: Codec) -> float:
        link = Link()
        return sum(
            relative_error(link.send(v, codec if step else EXACT), v) for step, v in enumerate(random_walk(steps=30))
        )

    by_bits = [error(Codec(bits)) for bits in GRIDS]
    by_tokens = [error(Codec(None, fraction)) for fraction in (0.1, 0.3, 0.6, 0.9)]
    assert by_bits == sorted(by_bits, reverse=True)
    assert by_tokens == sorted(by_tokens, reverse=True)


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("predictor", [0.0, 0.5, ADAPTIVE])
def test_both_ends_agree_after_steps_that_send_nothing(predictor: float | str, is_int8: bool) -> None:
    link, silent, coded = Link(is_int8), Codec(token_fraction=0.0, predictor=predictor), Codec(2, predictor=predictor)
    steps = random_walk(steps=20)
    assert section_bytes(silent, "v", SHAPE, torch.float32) == (0, 0)
    for step, values in enumerate(steps):
        codec = EXACT if not step else silent if 8 <= step < 12 else coded
        before = link.received.predict() if step else None
        found = link.send(values, codec)
        assert torch.equal(link.sent.predict(), link.received.predict())
        if codec is silent and predictor != 0.5:  # the prediction is the reference
            assert torch.equal(found, before)
    assert relative_error(found, values) < 0.05


def test_error_of_unsent_values_is_reported() -> None:
    link, (first, second) = Link(), random_walk(steps=2)
    link.send(first, EXACT)
    nothing = torch.empty(len(second), 0, dtype=torch.uint8)
    [error] = codecs.encode([codecs.CodedTensor(second, link.sent, Codec(token_fraction=0.0), None, nothing)])
    assert error.error_energy.item() == pytest.approx((second - first).square().sum().item(), rel=1e-5)
    assert error.value_energy.item() == pytest.approx(second.square().sum().item(), rel=1e-5)


def test_active_tokens_are_those_with_the_largest_drift() -> None:
    link = Link()
    first, second = random_walk(steps=2)
    link.send(first, EXACT)
    found = link.send(second, Codec(token_fraction=0.3))
    arrived = (found == second).all(-1).all(2)
    stayed = (found == first).all(-1).all(2)
    assert (arrived.sum(-1) == 3).all()
    assert torch.equal(stayed, ~arrived)
    drift = (second - first).square().sum((2, 4))
    for link_drift, active in zip(drift.flatten(0, 1), arrived.flatten(0, 1), strict=True):
        assert link_drift[active].min() >= link_drift[~active].max()


def test_drift_and_change_select_different_tokens() -> None:
    """Move token 0 slowly over several steps, and token 1 at the last step."""
    base = torch.zeros(1, 1, 1, 2, 8)
    link = {score: Link() for score in (DRIFT, CHANGE)}
    for score, one in link.items():
        codec, values = Codec(token_fraction=0.5, score=score), base.clone()
        one.send(values, EXACT)
        for _ in range(5):
            values = values.clone()
            values[0, 0, 0, 0] += 1.0
            select_tokens(values, one.sent, codec, 0)  # nothing is sent
        values = values.clone()
        values[0, 0, 0, 1] += 2.0
        assert select_tokens(values, one.sent, codec, 0).indices.item() == {"drift": 0, "change": 1}[score]


def test_random_selection_is_uniform_and_reproducible() -> None:
    values = torch.zeros(1, 1, 1, 50, 8)
    codec = Codec(token_fraction=0.2, score=RANDOM)
    picks = [select_tokens(values, LinkReference(), codec, seed).indices for seed in range(200)]
    counts = torch.bincount(torch.cat(picks, -1).flatten(), minlength=50)
    assert counts.sum() == 2000
    assert counts.min() >= 20 and counts.max() <= 62
    assert torch.equal(select_tokens(values, LinkReference(), codec, 3).indices, picks[3])


@pytest.mark.parametrize(
    "values", [{"bits": 3}, {"is_keyframe": True}, {"token_fraction": 1.5}, {"token_fraction": -0.1}, {"score": "mood"}]
)
def test_invalid_codecs_raise(values: dict) -> None:
    with pytest.raises(ValueError, match="is not valid"):
        Codec(**values)


KEYFRAME = Codec(8, is_keyframe=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keyframes_in_8_bits_use_no_reference(dtype: torch.dtype) -> None:
    values, link, used = random_walk(dtype, steps=3), Link(), Link()
    used.send(random_walk(dtype)[50], EXACT)
    found = link.send(values[0], KEYFRAME)
    assert torch.equal(used.send(values[0], KEYFRAME), found)
    channels = channel_scales(values[0])[:, None, :, None]
    largest = (values[0].float() / channels).abs().amax(-1, keepdim=True) * channels
    # Half a level of 255 between minus and plus the maximum, with scales in steps of a sixth of an octave.
    assert ((found.float() - values[0].float()).abs() <= 1.01 * largest * 2 ** (1 / 6) / 256 + 2**-8 * largest).all()
    # The change from zero to the first values is not extrapolated.
    assert torch.equal(link.sent.predict(1.0), link.sent.predict())
    codec = Codec(4, predictor=ADAPTIVE)
    for each in values[1:]:
        assert relative_error(link.send(each, codec), each) < 0.03
        assert torch.equal(link.sent.predict(), link.received.predict())


@pytest.mark.parametrize(("pace", "gain"), [(1.0, 1.0), (0.5, 0.5), (0.0, 0.0), (-1.0, 0.0), (3.0, 1.0)])
def test_adaptive_predictor_estimates_the_gain(pace: float, gain: float) -> None:
    """Estimate the ratio of successive changes, which differs between links."""
    codec, link = Codec(8, predictor=ADAPTIVE), Link()
    values, change = torch.zeros(SHAPE), torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    pace = torch.tensor([pace, 0.25]).view(2, 1, 1, 1, 1)
    for step in range(4):
        link.send(values, codec if step else EXACT)
        values, change = values + change, pace * change
    found = link.sent.gains / rows.GAIN_STEPS
    assert found.tolist() == pytest.approx([gain, 0.25], abs=0.04)
    assert link.received.gains is None  # every message carries the gain


def test_adaptive_predictor_is_better_on_lines_and_no_worse_on_noise() -> None:
    """Compare with gains of 0.5 and 0."""

    def error(codec: Codec, course: list[torch.Tensor]) -> float:
        link = Link()
        return sum(errors_of(link, codec, course))

    start, pace = random_walk(steps=2, pace=1.0)
    straight = [start + 0.02 * step * pace for step in range(30)]
    noise = [start + 0.1 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(n)) for n in range(30)]
    adaptive, half, none = (Codec(2, predictor=predictor) for predictor in (ADAPTIVE, 0.5, 0.0))
    assert error(adaptive, straight) < 0.9 * error(half, straight) < 0.9 * error(none, straight)
    assert error(adaptive, noise) < 1.02 * error(none, noise) < error(half, noise)


def test_references_of_another_shape_or_type_are_not_extrapolated() -> None:
    for first, second in ((torch.zeros(1, 1, 1, 8, 16), torch.float32), (torch.zeros(1, 1, 1, 16, 16), torch.bfloat16)):
        reference = LinkReference()
        reference.advance(first, keeps_previous=True)
        values = torch.ones(1, 1, 1, 16, 16, dtype=second)
        for has_previous in (False, True):
            reference.advance(values, keeps_previous=True)
            assert (reference.prediction(ADAPTIVE).previous is not None) is has_previous
