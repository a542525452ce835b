"""Tokens that all ranks have: what of them is found, and that attention sees them where they would have come."""

import pytest
import torch

from xfuser_cocodiff.attention.alike import LOOKS, Alike, AlikeTokens, Ends, putting_back
from xfuser_cocodiff.exchange.head_group import HeadGroup


@pytest.mark.parametrize(
    ("alike", "expected"),
    [
        ("1110000000", (3, 0)),
        ("0000000011", (0, 2)),
        ("1101000001", (2, 1)),
        ("0000000000", (0, 0)),
        ("1111111111", (9, 0)),  # one at least has to travel
        ("1" + 30 * "0", (0, 0)),  # too few
    ],
)
def test_ends_are_what_is_alike_from_either_side(alike: str, expected: tuple[int, int]) -> None:
    assert Ends.of(torch.tensor([each == "1" for each in alike])) == expected


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("ends", [Ends(2, 0), Ends(0, 3), Ends(2, 1), Ends()])
def test_attention_sees_all_tokens_in_their_places(ends: Ends, count: int) -> None:
    """As an all-to-all would have brought them: for each source its tokens, of the heads of this rank."""
    ranks, here, heads, tokens = 3, 1, 4, 5
    shared = torch.randn(2, ranks * heads, tokens, 8)
    of_rank = [torch.randn_like(shared) for _ in range(ranks)]
    for mine in of_rank:
        for alike, its in zip(ends.left_out(shared), ends.left_out(mine), strict=True):
            its.copy_(alike)

    def arrived(sent: list[torch.Tensor], group: HeadGroup) -> torch.Tensor:
        return torch.cat([group.of(each[:, here * heads : (here + 1) * heads], 1) for each in sent], 2)

    own = [of_rank[here]] * 3
    known = Alike((), (ends, Ends(), ends), LOOKS)
    for index in range(count):
        group = HeadGroup(index, count)
        whole, cut = arrived(of_rank, group), arrived([ends.without(each) for each in of_rank], group)
        attend = putting_back(lambda *given: torch.stack(given[:3]), own, known, ranks, here)
        assert torch.equal(attend(cut, whole, cut, group), torch.stack([whole] * 3))


class Place:
    """Stands for a layer."""


def test_what_is_alike_only_once_travels() -> None:
    """Noise may be alike by its seed, at the first step."""
    answers = [[True] * 4 + [False] * 8, [True] * 2 + [False] * 10]
    tokens = AlikeTokens(lambda marks: torch.tensor(answers.pop(0)).expand_as(marks), lambda: None)
    layer, tensors = Place(), [torch.randn(1, 2, 4, 8) for _ in range(3)]
    tokens.look(layer, tensors)
    assert tokens.of(layer, tensors) is None
    tokens.look(layer, tensors)
    found = tokens.of(layer, tensors)
    assert found.ends == ((2, 0), (0, 0), (0, 0)) and tokens.of(layer, tensors[2:]) is found
    assert [each.shape[2] for each in found.without(tensors)] == [2, 4, 4]
    assert tokens.of(layer, [tensor[:, :, 1:] for tensor in tensors]) is None  # of other tokens nothing is known
    assert tokens.of(layer, [torch.randn(1, 3, 4, 8) for _ in range(3)]) is found  # padded heads are no other tokens
    tokens.look(layer, tensors)  # and nobody is asked once more
    assert not answers


def test_what_was_left_out_is_compared_after_each_step() -> None:
    told, numbers, verdict = [], [], [True]

    def same(given: torch.Tensor) -> torch.Tensor:
        numbers.append(given)
        return torch.tensor(verdict).expand_as(given)

    tokens = AlikeTokens(same, lambda: told.append("differ"))
    layer, tensors = Place(), [torch.randn(1, 2, 4, 8) for _ in range(3)]
    for _ in range(LOOKS):
        tokens.look(layer, tensors)
    alike = tokens.of(layer, tensors)
    numbers.clear()
    tokens.end_step()
    assert not numbers  # nothing was left out
    for changes in ((), (0, 1), (1, 0), (2, 2)):
        changed = [tensor.clone() for tensor in tensors]
        if changes:
            changed[changes[0]][0, 1, changes[1], 3] += 1
        tokens.left_out(alike, tensors)
        tokens.left_out(alike, changed)
        tokens.end_step()
    assert len({int(number) for number in numbers}) == 4 and not told
    verdict[0] = False
    tokens.left_out(alike, tensors)
    tokens.end_step()
    assert told == ["differ"] and tokens.of(layer, tensors) is None and tokens.of(layer, tensors[2:]) is None
