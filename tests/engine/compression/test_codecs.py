"""Codecs on one link: sender and receiver agree, and what is left out does not add up."""

import itertools

import pytest
import torch

from tests.quick import pairwise, slow_but
from xfuser_cocodiff.engine.compression import codecs
from xfuser_cocodiff.engine.compression.codecs import ADAPTIVE, EXACT, Codec, LinkReference
from xfuser_cocodiff.engine.kernels import rows
from xfuser_cocodiff.engine.kernels.quantize import GRIDS

SHAPE = (2, 3, 4, 10, 16)
"""Links, groups, heads, tokens, head dim."""
LOSSY = [
    Codec(bits, share, score, predictor)
    for bits, share, score, predictor in itertools.product(
        (None, *GRIDS), (1.0, 0.5), codecs.SCORES, (0.0, 0.5, codecs.ADAPTIVE)
    )
    if (bits or share < 1) and (share < 1 or score == codecs.DRIFT)
]
DRIFTING = slow_but(
    [
        Codec(8),
        Codec(2, predictor=codecs.ADAPTIVE),
        Codec(1.6, predictor=0.5),
        Codec(1, 0.5),
        Codec(None, 0.5, predictor=0.5),
    ],
    [c for c in LOSSY if c.score == codecs.DRIFT],
)


class Link:
    """Both ends of a link."""

    def __init__(self, compact: bool = False) -> None:
        self.sent, self.received = LinkReference(compact), LinkReference(compact)

    def carry(self, values: torch.Tensor, codec: Codec, seed: int = 0) -> torch.Tensor:
        """What arrives of values; only what an exchange would send goes from one end to the other."""
        links, groups, _, tokens, _ = values.shape
        of_choice, of_values = codecs.section_bytes(codec, "v", values.shape, values.dtype)
        chosen = unpacked = None
        if codec.chooses:
            chosen = codecs.choose(values, self.sent, codec, seed)
            packed = torch.empty(links, of_choice, dtype=torch.uint8)
            codecs.pack_choice(chosen, packed)
            unpacked = codecs.unpack_choice(packed, groups, tokens, codec.active(tokens))
        payload = torch.empty(links, of_values, dtype=torch.uint8)
        codecs.encode(values, self.sent, codec, chosen, payload)
        found = torch.empty_like(values)
        codecs.decode(payload, self.received, codec, unpacked, found)
        return found


def walk(dtype: torch.dtype = torch.float32, pace: float = 0.05, steps: int = 100) -> list[torch.Tensor]:
    """Values that change a little at each step."""
    generator = torch.Generator().manual_seed(7)
    values, found = torch.randn(SHAPE, generator=generator), []
    for _ in range(steps):
        found.append(values.to(dtype))
        values = values + pace * torch.randn(SHAPE, generator=generator)
    return found


def lacking(found: torch.Tensor, values: torch.Tensor) -> float:
    """Relative error."""
    return ((found.float() - values.float()).norm() / values.float().norm()).item()


@pytest.mark.parametrize(
    ("bits", "share", "score", "predictor", "dtype", "compact"),
    pairwise(
        (codec.bits, codec.share, codec.score, codec.predictor, dtype, compact)
        for codec in LOSSY
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for compact in (False, True)
    ),
    ids=str,
)
def test_both_ends_hold_the_same_after_100_steps(
    bits: float | None, share: float, score: str, predictor: float | str, dtype: torch.dtype, compact: bool
) -> None:
    link, codec = Link(compact), Codec(bits, share, score, predictor)
    for step, values in enumerate(walk(dtype)):
        found = link.carry(values, codec if step else EXACT, seed=step)
        assert found.dtype == dtype
        assert torch.equal(link.sent.expected(), link.received.expected())
        assert torch.equal(link.sent.expected(0.5), link.received.expected(0.5))
        assert compact or torch.equal(found, link.received.expected())


def test_exact_is_exact_and_fits_say_when_there_is_a_reference() -> None:
    link = Link()
    values = walk(torch.bfloat16, steps=1)[0]
    assert not link.sent.fits(values.shape, values.dtype)
    assert torch.equal(link.carry(values, EXACT), values)
    assert link.sent.fits(values.shape, values.dtype)
    assert not link.sent.fits(values[:, :2].shape, values.dtype) and not link.sent.fits(values.shape, torch.float32)


@pytest.mark.parametrize("codec", DRIFTING, ids=str)
def test_what_stands_still_arrives(codec: Codec) -> None:
    """Error feedback: a constant is reached, from anywhere."""
    link = Link()
    start, end = walk(pace=1.0, steps=2)
    link.carry(start, EXACT)
    errors = [lacking(link.carry(end, codec), end) for _ in range(400)]
    assert errors[0] > 1e-3
    assert errors[-1] < 1e-3 * errors[0]


@pytest.mark.parametrize("codec", DRIFTING, ids=str)
def test_what_drifts_is_followed(codec: Codec) -> None:
    """The error stays where it came to in the first steps."""
    link = Link()
    errors = [lacking(link.carry(values, codec if step else EXACT), values) for step, values in enumerate(walk())]
    assert max(errors[50:]) < 1.5 * max(errors[5:50])
    # Without feedback, 100 steps of this size would have led away by their root of squares.
    assert max(errors) < 0.5 * 0.05 * 100**0.5


def test_more_bits_and_more_tokens_lose_less() -> None:
    def loss(codec: Codec) -> float:
        link = Link()
        return sum(lacking(link.carry(v, codec if step else EXACT), v) for step, v in enumerate(walk(steps=30)))

    by_bits = [loss(Codec(bits)) for bits in GRIDS]
    by_share = [loss(Codec(None, share)) for share in (0.1, 0.3, 0.6, 0.9)]
    assert by_bits == sorted(by_bits, reverse=True)
    assert by_share == sorted(by_share, reverse=True)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("predictor", [0.0, 0.5, codecs.ADAPTIVE])
def test_both_ends_wait_for_what_is_not_sent(predictor: float | str, compact: bool) -> None:
    link, silent, coded = Link(compact), Codec(share=0.0, predictor=predictor), Codec(2, predictor=predictor)
    steps = walk(steps=20)
    assert codecs.section_bytes(silent, "v", SHAPE, torch.float32) == (0, 0)
    for step, values in enumerate(steps):
        codec = EXACT if not step else silent if 8 <= step < 12 else coded
        before = link.received.expected() if step else None
        found = link.carry(values, codec)
        assert torch.equal(link.sent.expected(), link.received.expected())
        if codec is silent and predictor != 0.5:  # nothing is expected to change
            assert torch.equal(found, before)
    assert lacking(found, values) < 0.05


def test_what_is_lacking_where_nothing_is_sent_is_told() -> None:
    link, (first, second) = Link(), walk(steps=2)
    link.carry(first, EXACT)
    loss = codecs.encode(second, link.sent, Codec(share=0.0), None, torch.empty(len(second), 0, dtype=torch.uint8))
    assert loss.lacking.item() == pytest.approx((second - first).square().sum().item(), rel=1e-5)
    assert loss.wanted.item() == pytest.approx(second.square().sum().item(), rel=1e-5)


def test_inactive_tokens_stay_and_active_ones_arrive() -> None:
    link = Link()
    first, second = walk(steps=2)
    link.carry(first, EXACT)
    found = link.carry(second, Codec(share=0.3))
    arrived = (found == second).all(-1).all(2)
    stayed = (found == first).all(-1).all(2)
    assert (arrived.sum(-1) == 3).all()
    assert torch.equal(stayed, ~arrived)
    drift = (second - first).square().sum((2, 4))
    for link_drift, chosen in zip(drift.flatten(0, 1), arrived.flatten(0, 1), strict=True):
        assert link_drift[chosen].min() >= link_drift[~chosen].max()


def test_scores_differ_as_they_say() -> None:
    """Token 0 has crept away, token 1 has just moved."""
    base = torch.zeros(1, 1, 1, 2, 8)
    link = {score: Link() for score in (codecs.DRIFT, codecs.CHANGE)}
    for score, one in link.items():
        codec, values = Codec(share=0.5, score=score), base.clone()
        one.carry(values, EXACT)
        for _ in range(5):
            values = values.clone()
            values[0, 0, 0, 0] += 1.0
            codecs.choose(values, one.sent, codec, 0)  # nothing is sent
        values = values.clone()
        values[0, 0, 0, 1] += 2.0
        assert codecs.choose(values, one.sent, codec, 0).indices.item() == {"drift": 0, "change": 1}[score]


def test_chance_is_fair_and_repeats_itself() -> None:
    values = torch.zeros(1, 1, 1, 50, 8)
    codec = Codec(share=0.2, score=codecs.RANDOM)
    picks = [codecs.choose(values, LinkReference(), codec, seed).indices for seed in range(200)]
    counts = torch.bincount(torch.cat(picks, -1).flatten(), minlength=50)
    assert counts.sum() == 2000
    assert counts.min() >= 20 and counts.max() <= 62
    assert torch.equal(codecs.choose(values, LinkReference(), codec, 3).indices, picks[3])


@pytest.mark.parametrize(
    "values", [{"bits": 3}, {"is_keyframe": True}, {"share": 1.5}, {"share": -0.1}, {"score": "mood"}]
)
def test_what_is_no_codec(values: dict) -> None:
    with pytest.raises(ValueError, match="is not valid"):
        Codec(**values)


BEGINS = Codec(8, is_keyframe=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_first_step_in_8_bits_owes_nothing_to_what_was_before(dtype: torch.dtype) -> None:
    values, link, used = walk(dtype, steps=3), Link(), Link()
    used.carry(walk(dtype)[50], EXACT)
    found = link.carry(values[0], BEGINS)
    assert torch.equal(used.carry(values[0], BEGINS), found)
    largest = values[0].float().abs().amax(-1, keepdim=True)
    # A level's half, of 255 from the maximum to its negative, where a scale goes up by a sixth of an octave.
    assert ((found.float() - values[0].float()).abs() <= 1.01 * largest * 2 ** (1 / 6) / 256 + 2**-8 * largest).all()
    # The change from nothing to the first values is none that comes again.
    assert torch.equal(link.sent.expected(1.0), link.sent.expected())
    codec = Codec(4, predictor=codecs.ADAPTIVE)
    for each in values[1:]:
        assert lacking(link.carry(each, codec), each) < 0.03
        assert torch.equal(link.sent.expected(), link.received.expected())


@pytest.mark.parametrize(("pace", "share"), [(1.0, 1.0), (0.5, 0.5), (0.0, 0.0), (-1.0, 0.0), (3.0, 1.0)])
def test_an_adaptive_predictor_finds_what_comes_again(pace: float, share: float) -> None:
    """Changes that are so many times the one before, on each link another number."""
    codec, link = Codec(8, predictor=codecs.ADAPTIVE), Link()
    values, change = torch.zeros(SHAPE), torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    pace = torch.tensor([pace, 0.25]).view(2, 1, 1, 1, 1)
    for step in range(4):
        link.carry(values, codec if step else EXACT)
        values, change = values + change, pace * change
    found = link.sent.again / rows.SHARES
    assert found.tolist() == pytest.approx([share, 0.25], abs=0.04)
    assert link.received.again is None  # it is told in every message


def test_an_adaptive_predictor_follows_straight_lines_better_and_noise_no_worse() -> None:
    """Than half of the change, which is what the modes had before; and than none."""

    def loss(codec: Codec, course: list[torch.Tensor]) -> float:
        link = Link()
        return sum(lacking(link.carry(v, codec if step else EXACT), v) for step, v in enumerate(course))

    start, pace = walk(steps=2, pace=1.0)
    straight = [start + 0.02 * step * pace for step in range(30)]
    noise = [start + 0.1 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(n)) for n in range(30)]
    adaptive, half, none = (Codec(2, predictor=predictor) for predictor in (codecs.ADAPTIVE, 0.5, 0.0))
    assert loss(adaptive, straight) < 0.9 * loss(half, straight) < 0.9 * loss(none, straight)
    assert loss(adaptive, noise) < 1.02 * loss(none, noise) < loss(half, noise)


def test_nothing_is_extrapolated_from_values_of_another_shape_or_type() -> None:
    for first, second in ((torch.zeros(1, 1, 1, 8, 16), torch.float32), (torch.zeros(1, 1, 1, 16, 16), torch.bfloat16)):
        reference = LinkReference()
        reference.advance(first, keeps_change=True)
        values = torch.ones(1, 1, 1, 16, 16, dtype=second)
        for has_change in (False, True):
            reference.advance(values, keeps_change=True)
            assert (reference.known(ADAPTIVE).before is not None) is has_change
