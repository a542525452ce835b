"""Labels beside points: none covers another one, nor a point."""

import itertools

import pytest

from xfuser_cocodiff.lab.cluster_bench.label_placement import Box, place_labels, stack_labels

AREA = Box(0, 0, 400, 300)


def test_a_lone_label_is_right_of_its_point() -> None:
    assert place_labels([(100, 100)], [(50, 10)], AREA, gap=5) == [Box(105, 95, 155, 105)]


def test_labels_of_near_points_do_not_overlap() -> None:
    points = [(200 + 3 * number, 150 + 2 * number) for number in range(8)]
    boxes = place_labels(points, [(80, 12)] * 8, AREA, gap=5, taken=[Box(0, 140, 190, 160)])
    placed = [box for box in boxes if box]
    assert len(placed) == 8 and all(box.is_within(AREA) for box in placed)
    assert not [pair for pair in itertools.combinations(placed, 2) if pair[0].overlaps(pair[1])]
    assert not any(box.overlaps(Box(x, y, x, y)) for box in placed for x, y in points)
    assert not any(box.overlaps(Box(0, 140, 190, 160)) for box in placed)


def test_a_label_without_room_is_left_out() -> None:
    assert place_labels([(5, 5)], [(50, 10)], Box(0, 0, 20, 20), gap=5) == [None]


@pytest.mark.parametrize(
    ("heights", "centers"),
    [
        ([50, 20], [50, 20]),
        ([50, 50, 50], [50, 60, 70]),
        ([100, 98, 20], [100, 90, 20]),
        ([0, 0], [5, 15]),
    ],
)
def test_stacked_labels_are_apart_and_in_order(heights: list[float], centers: list[float]) -> None:
    assert stack_labels(heights, 10, 5, 100) == centers
