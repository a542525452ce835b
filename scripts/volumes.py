"""Flights through procedural volumes in the manner of X-ray micro-tomography, and a heart that beats.

The small Wan is trained on them. `xfuser_cocodiff.lab.models.slices` is the same for pictures. Everything is
a function of place and time, evaluated where the moving view is, so that a frame costs what a slice does and motion is
exact.
"""

from collections.abc import Iterator

import numpy as np

KINDS = ("bodies", "cells", "vessels", "texture", "heart")
FRAMES = 9


def draw(kind: str, size: int, rng: np.random.Generator, frames: int = FRAMES) -> np.ndarray:
    """Draw one video of a kind.

    Args:
        kind: one of :data:`KINDS`.
        size: edge length in pixels.
        rng: source of all randomness.
        frames: how many.

    Returns:
        Float32 array of shape (frames, size, size), grey values in [0, 1].
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    return np.clip(_DRAWERS[kind](size, frames, rng), 0.0, 1.0).astype(np.float32)


View = tuple[np.ndarray, np.ndarray, np.ndarray]
"""z (frames, 1, 1), y (frames, size, 1) and x (frames, 1, size) of all pixels; a frame is 1 wide."""


def _flight(size: int, frames: int, rng: np.random.Generator) -> View:
    """A steady flight into the volume that drifts to a side; half of it is behind z = 0."""
    time = np.arange(frames, dtype=np.float32)[:, None, None] - (frames - 1) / 2
    axis = (np.arange(size, dtype=np.float32) + 0.5) / size
    heading, drift = rng.uniform(0, 2 * np.pi), rng.uniform(0.004, 0.018)
    down, right = drift * np.sin(heading), drift * np.cos(heading)
    return rng.uniform(0.015, 0.03) * time, axis[:, None] + down * time, axis + right * time


def _step(value: np.ndarray) -> np.ndarray:
    """A soft edge from 0 to 1."""
    return 0.5 + 0.5 * np.tanh(value / 2)


def _waves(view: View, low: float, high: float, rng: np.random.Generator, along: float = 1.0) -> np.ndarray:
    """Plane waves of unit variance together, `low` to `high` of them in a picture; fewer `along` fibres."""
    z, y, x = view
    count, angle = 16, rng.uniform(0, np.pi)
    total = 0.0
    for _ in range(count):
        heading, pace = rng.uniform(0, 2 * np.pi), 2 * np.pi * rng.uniform(low, high)
        fibre, across = along * np.cos(heading), np.sin(heading)
        ky = pace * (fibre * np.cos(angle) - across * np.sin(angle))
        kx = pace * (fibre * np.sin(angle) + across * np.cos(angle))
        total = total + np.sin(ky * y + kx * x + 0.5 * pace * rng.uniform(-1, 1) * z + rng.uniform(0, 2 * np.pi))
    return total * np.sqrt(2 / count)


def _bodies(size: int, frames: int, rng: np.random.Generator) -> np.ndarray:
    z, y, x = view = _flight(size, frames, rng)
    picture = 0.32 + 0.03 * _waves(view, 0.5, 2, rng)
    for _ in range(rng.integers(10, 19)):
        (cy, cx), cz = rng.uniform(-0.05, 1.05, 2), rng.uniform(-0.2, 0.2)
        long, angle = rng.uniform(0.1, 0.2), rng.uniform(0, np.pi)
        short, deep = long * rng.uniform(0.6, 1.0), long * rng.uniform(0.7, 1.2)
        dy, dx = y - cy, x - cx
        u, v = dy * np.cos(angle) + dx * np.sin(angle), dx * np.cos(angle) - dy * np.sin(angle)
        radius = np.sqrt((u / long) ** 2 + (v / short) ** 2 + ((z - cz) / deep) ** 2)
        inside, nucleus = _step((1 - radius) * 18), _step((0.45 - radius) * 18)
        picture = picture * (1 - inside) + rng.uniform(0.65, 0.92) * inside - 0.35 * nucleus
    return picture


def _cells(size: int, frames: int, rng: np.random.Generator) -> np.ndarray:
    z, y, x = _flight(size, frames, rng)
    first = np.full((frames, size, size), 9.0, np.float32)
    second, shade = first, first
    for _ in range(rng.integers(26, 42)):
        cz, (cy, cx) = rng.uniform(-0.4, 0.4), rng.uniform(-0.25, 1.25, 2)
        distance = np.sqrt((z - cz) ** 2 + (y - cy) ** 2 + (x - cx) ** 2)
        nearer = distance < first
        second = np.where(nearer, first, np.minimum(second, distance))
        first, shade = np.where(nearer, distance, first), np.where(nearer, rng.uniform(0.2, 0.55), shade)
    membrane = np.exp(-(((second - first) / 0.035) ** 2))
    return shade * (1 - membrane) + 0.92 * membrane


def _vessels(size: int, frames: int, rng: np.random.Generator) -> np.ndarray:
    z, y, x = view = _flight(size, frames, rng)
    picture = 0.65 + 0.03 * _waves(view, 0.5, 2, rng)
    inside = np.full((frames, size, size), -1.0, np.float32)
    for (cy, cx), cz, width in _tubes(rng):
        inside = np.maximum(inside, width - np.sqrt((z - cz) ** 2 + (y - cy) ** 2 + (x - cx) ** 2))
    return picture + (0.12 - picture) * _step(inside * 150)


def _tubes(rng: np.random.Generator) -> Iterator[tuple[np.ndarray, float, float]]:
    """Points (y, x), their z, and the width there, along vessels that cross the picture and branch."""
    tips = []
    for _ in range(rng.integers(2, 4)):
        heading, width = rng.uniform(0, 2 * np.pi), rng.uniform(0.06, 0.1)
        start = 0.5 - 0.75 * np.array([np.sin(heading), np.cos(heading)]) + rng.uniform(-0.3, 0.3, 2)
        tips.append((start, rng.uniform(-0.08, 0.08), heading, width))
    while tips:
        point, depth, heading, width = tips.pop()
        climb = rng.uniform(-0.15, 0.15)
        for _ in range(50):
            if np.all(np.abs(point - 0.5) < 0.75):
                yield point, depth, width
            heading += rng.normal(0, 0.13)
            point, depth = point + 0.03 * np.array([np.sin(heading), np.cos(heading)]), depth + 0.03 * climb
            if width > 0.05 and rng.uniform() < 0.05:
                tips.append((point, depth, heading + rng.choice([-1, 1]) * rng.uniform(0.5, 1.0), width * 0.75))


def _texture(size: int, frames: int, rng: np.random.Generator) -> np.ndarray:
    return 0.5 + 0.18 * _waves(_flight(size, frames, rng), 4, 7, rng, along=0.15)


def _heart(size: int, frames: int, rng: np.random.Generator) -> np.ndarray:
    """A dark chamber in a bright wall that grows thick as the chamber grows small; about a beat in all frames."""
    axis = (np.arange(size, dtype=np.float32) + 0.5) / size
    (cy, cx), angle = rng.uniform(0.4, 0.6, 2), rng.uniform(0, np.pi)
    dy, dx = axis[:, None] - cy, axis - cx
    u, v = dy * np.cos(angle) + dx * np.sin(angle), dx * np.cos(angle) - dy * np.sin(angle)
    radius = np.hypot(u, v * rng.uniform(1.0, 1.35))
    beat = np.sin(2 * np.pi * (np.arange(frames)[:, None, None] / rng.uniform(8, 11) + rng.uniform()))
    outer = rng.uniform(0.25, 0.38) * (1 + 0.08 * beat)
    chamber = outer * (rng.uniform(0.5, 0.62) + 0.22 * beat)
    chest = _step((rng.uniform(0.52, 0.65) - radius) * 60)
    wall, blood = _step((outer - radius) * 90), _step((chamber - radius) * 90)
    return 0.1 + 0.3 * chest + rng.uniform(0.4, 0.5) * wall - rng.uniform(0.5, 0.6) * blood


_DRAWERS = {"bodies": _bodies, "cells": _cells, "vessels": _vessels, "texture": _texture, "heart": _heart}
