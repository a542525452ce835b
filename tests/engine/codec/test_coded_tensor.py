"""Codecs on one link: both ends have the same reference, and errors do not accumulate."""

import itertools

import pytest
import torch

from tests.quick import covering
from xfuser_cocodiff.engine.codec import coded_tensor, rows
from xfuser_cocodiff.engine.codec.active_tokens import pack_active, select_tokens, unpack_active
from xfuser_cocodiff.engine.codec.codec import EXACT, Codec, message_layout
from xfuser_cocodiff.engine.codec.link_reference import LinkReference
from xfuser_cocodiff.engine.codec.quantize import GRIDS

SHAPE = (2, 3, 4, 10, 16)
"""Links, groups, heads, tokens, head dim."""
PREDICTIONS = (False, True)
SELECTING, KEYFRAME = Codec(token_fraction=0.5), Codec(8, is_keyframe=True)
LOSSY = [SELECTING, *(Codec(bits, predicts=predicts) for bits, predicts in itertools.product(GRIDS, PREDICTIONS))]


class Link:
    """Both ends of a link.

    Args:
        is_exact: whether references are stored as they are, as for V-Major.
    """

    def __init__(self, is_exact: bool = False) -> None:
        self.sent, self.received = LinkReference(is_exact), LinkReference(is_exact)

    @classmethod
    def of(cls, codec: Codec) -> "Link":
        """Return a link whose references are stored as a run with this codec does."""
        return cls(is_exact=codec.selects_tokens)

    def send(self, values: torch.Tensor, codec: Codec) -> torch.Tensor:
        """Return values as the receiver decodes them, from the sections of a message only."""
        links, groups, _, tokens, _ = values.shape
        layout = message_layout((("v", codec, values.shape),), values.dtype)
        buffer = torch.empty(links, layout.nbytes, dtype=torch.uint8)
        mask, payload = (buffer.narrow(1, *section) for [section] in (layout.masks, layout.payloads))
        active = received_active = None
        if codec.selects_tokens:
            active = select_tokens(values, self.sent, codec)
            pack_active(active, mask)
            received_active = unpack_active(mask, groups, tokens, codec.num_active(tokens))
        energies = torch.empty(1, 2)
        coded_tensor.encode([coded_tensor.CodedTensor(values, self.sent, codec, active, payload)], energies)
        received = torch.empty_like(values)
        coded_tensor.decode([coded_tensor.CodedTensor(received, self.received, codec, received_active, payload)])
        assert self.has_equal_ends
        return received

    @property
    def has_equal_ends(self) -> bool:
        """Whether both ends hold the same bits."""
        return len(self.sent.stored) > 0 and all(map(torch.equal, self.sent.stored, self.received.stored))


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


def errors_of(codec: Codec, course: list[torch.Tensor]) -> list[float]:
    """Return the relative error at each step, of which the first is lossless."""
    link = Link.of(codec)
    return [relative_error(link.send(values, codec if step else EXACT), values) for step, values in enumerate(course)]


@pytest.mark.parametrize(
    ("codec", "dtype", "first"),
    [*covering(itertools.product(LOSSY, (torch.float32, torch.bfloat16, torch.float16), (EXACT, KEYFRAME)), 2)],
    ids=str,
)
def test_both_ends_have_the_same_reference_after_100_steps(codec: Codec, dtype: torch.dtype, first: Codec) -> None:
    """Each step compares them; what is decoded is the reference, but for its rounding to 8 bits."""
    link = Link.of(codec)
    for step, values in enumerate(random_walk(dtype)):
        found = link.send(values, codec if step else EXACT if codec.selects_tokens else first)
        assert found.dtype == dtype
        rounding = 0.0 if codec.selects_tokens else 1.13 / 127 / 2 + torch.finfo(dtype).eps
        largest = found.float().abs().amax((-1, -2), keepdim=True)
        assert ((found.float() - link.received.values.float()).abs() <= rounding * largest).all()


@pytest.mark.parametrize("codec", [Codec(8), Codec(2, predicts=True), Codec(1), SELECTING], ids=str)
def test_errors_do_not_accumulate(codec: Codec) -> None:
    """Keep the error at the level of the first steps."""
    errors = errors_of(codec, random_walk())
    assert max(errors[50:]) < 1.5 * max(errors[5:50])
    # Without error feedback, the error would grow with the root of the number of steps.
    assert max(errors) < 0.5 * 0.05 * 100**0.5


@pytest.mark.parametrize("bits", GRIDS)
def test_error_is_that_of_the_distortion(bits: float) -> None:
    """Rate control derives the residual from the error by this number."""
    link, (first, second) = Link(), random_walk(pace=0.3, steps=2)
    link.send(first, EXACT)
    change = relative_error(link.received.values, second)
    assert relative_error(link.send(second, Codec(bits)), second) == pytest.approx(
        GRIDS[bits].distortion * change, rel=0.2
    )


def test_active_tokens_are_those_that_have_changed_most() -> None:
    link = Link(is_exact=True)
    first, second = random_walk(steps=2)
    link.send(first, EXACT)
    found = link.send(second, Codec(token_fraction=0.3))
    arrived = (found == second).all(-1).all(2)
    stayed = (found == first).all(-1).all(2)
    assert (arrived.sum(-1) == 3).all()
    assert torch.equal(stayed, ~arrived)
    change = (second - first).abs().sum((2, 4))
    for link_change, active in zip(change.flatten(0, 1), arrived.flatten(0, 1), strict=True):
        assert link_change[active].min() >= link_change[~active].max()


def test_references_that_are_written_in_place_are_those_in_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """At any change of codec from step to step."""
    steps = [KEYFRAME, Codec(4), *[Codec(2, predicts=True)] * 4, Codec(8), KEYFRAME, Codec(2, predicts=True), EXACT]
    course = random_walk(steps=2 * len(steps))

    def received() -> list[torch.Tensor]:
        link = Link()
        return [link.send(values, codec) for values, codec in zip(course, 2 * steps, strict=True)]

    found = received()
    monkeypatch.setattr(LinkReference, "memory", lambda _, shape, *__: rows.Int8Rows.of(torch.ones(shape)))
    assert all(map(torch.equal, found, received()))


def test_prediction_is_better_on_lines_and_no_worse_on_noise() -> None:
    start, pace = random_walk(steps=2, pace=1.0)
    straight = [start + 0.02 * step * pace for step in range(30)]
    noise = [start + 0.1 * torch.randn(SHAPE, generator=torch.Generator().manual_seed(n)) for n in range(30)]
    found = {
        predicts: [sum(errors_of(Codec(2, predicts=predicts), course)) for course in (straight, noise)]
        for predicts in PREDICTIONS
    }
    assert found[True][0] < 0.8 * found[False][0]
    assert found[True][1] < 1.02 * found[False][1]
