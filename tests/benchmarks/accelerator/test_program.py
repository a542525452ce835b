"""Tests of recorded programs: patterns of groups repeat over the ranks, and messages are counted for every rank."""

import itertools

import pytest

from benchmarks.accelerator.program import GroupPattern, Program, RecordedCollective
from benchmarks.accelerator.time_line import Instant


@pytest.mark.parametrize("axes", [(2,), (2, 3), (3, 2, 4), (2, 2, 2)])
def test_patterns_give_the_group_of_every_rank(axes: tuple[int, ...]) -> None:
    places = list(itertools.product(*map(range, axes)))  # of the ranks, the outermost axis first
    for moving in itertools.chain.from_iterable(itertools.combinations(range(len(axes)), n) for n in range(4)):
        groups = [
            [
                peer
                for peer, other in enumerate(places)
                if all(m or a == b for m, a, b in zip(moving, own, other, strict=False))
            ]
            for own in places
        ]
        pattern = GroupPattern.of(groups[0])
        assert pattern.size == len(groups[0])
        assert [list(pattern.members(rank)) for rank in range(len(places))] == groups


def test_ranks_that_do_not_repeat_are_refused() -> None:
    with pytest.raises(ValueError, match="does not repeat"):
        GroupPattern.of([0, 1, 3])


def test_messages_are_counted_by_peer() -> None:
    pairs, everyone = GroupPattern.of([0, 2]), GroupPattern.of(range(4))
    program = Program(
        [
            RecordedCollective(pairs, Instant(), (9, 5), (9, 5)),
            RecordedCollective(everyone, Instant(), (9, 1, 2, 3), (9, 3, 2, 1)),
            RecordedCollective(everyone, Instant(), (9, 0, 0, 4), (9, 4, 0, 0)),
        ]
    )
    assert program.sent_bytes(0) == {2: 5 + 2, 1: 1, 3: 3 + 4}
    assert program.sent_bytes(3) == {1: 5 + 2, 0: 1, 2: 3 + 4}
    assert {group: len(each) for group, each in program.by_group().items()} == {pairs: 1, everyone: 2}
    assert [each.is_all_to_all for each in program.collectives] == [False, True, False]
