"""Places labels beside the points of a chart, so that no label covers another one or a point."""

from collections.abc import Sequence
from dataclasses import dataclass

_DISTANCES = (1.0, 2.5, 4.0, 6.0, 8.5, 11.5, 15.0)
"""Distances that are tried, in gaps."""
_DIRECTIONS = ((1, 0), (-1, 0), (1, 0.8), (-1, 0.8), (1, -0.8), (-1, -0.8), (0, 1), (0, -1))
"""Directions that are tried; y grows upward."""


@dataclass(frozen=True)
class Box:
    """Rectangle in pixels."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: "Box") -> bool:
        """Return whether two rectangles share an area."""
        return (
            self.left < other.right and other.left < self.right and self.bottom < other.top and other.bottom < self.top
        )

    def is_within(self, other: "Box") -> bool:
        """Return whether the rectangle lies in another one."""
        return (
            self.left >= other.left
            and self.right <= other.right
            and self.bottom >= other.bottom
            and self.top <= other.top
        )


def place_labels(
    points: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    area: Box,
    gap: float,
    taken: Sequence[Box] = (),
) -> list[Box | None]:
    """Return where the label of each point goes: the nearest free place, or None if there is none.

    Args:
        points: pixels of the points.
        sizes: width and height of the labels.
        area: labels stay within it.
        gap: distance of a label from its point where there is room.
        taken: other rectangles that labels do not cover.
    """
    radius = 0.6 * gap
    used = [*taken, *(Box(x - radius, y - radius, x + radius, y + radius) for x, y in points)]
    placed: dict[int, Box | None] = {}
    for index in sorted(range(len(points)), key=lambda each: (-points[each][1], points[each][0])):
        candidates = [
            _beside(points[index], sizes[index], direction, gap * distance)
            for distance in _DISTANCES
            for direction in _DIRECTIONS
        ]
        free = [each for each in candidates if each.is_within(area) and not any(map(each.overlaps, used))]
        placed[index] = free[0] if free else None
        used += free[:1]
    return [placed[index] for index in range(len(points))]


def stack_labels(heights: Sequence[float], size: float, bottom: float, top: float) -> list[float]:
    """Return the centers of labels in a column: as near as possible to the heights, and at least `size` apart.

    Args:
        heights: pixels of the points, in any order.
        size: height of a label.
        bottom: lowest center.
        top: highest center; exceeded if there is no room for all.
    """
    order = sorted(range(len(heights)), key=lambda each: heights[each])
    centers: list[float] = []
    for index in order:
        centers.append(max(heights[index], bottom, centers[-1] + size if centers else bottom))
    limit = max(top, bottom + size * (len(order) - 1))
    for place in reversed(range(len(centers))):
        centers[place] = min(centers[place], limit)
        limit = centers[place] - size
    by_index = dict(zip(order, centers, strict=True))
    return [by_index[index] for index in range(len(heights))]


def _beside(
    point: tuple[float, float], size: tuple[float, float], direction: tuple[float, float], distance: float
) -> Box:
    """Return the rectangle of a label in a direction from a point."""
    x, y, (width, height) = *point, size
    center_x = x + direction[0] * (distance + width / 2) if direction[0] else x
    center_y = y + direction[1] * (distance + height / 2)
    return Box(center_x - width / 2, center_y - height / 2, center_x + width / 2, center_y + height / 2)
