"""Generates videos that resemble flights through X-ray micro-tomography volumes, and a beating heart.

The small Wan is trained on them. `xfuser_cocodiff.lab.models.slices` generates similar images. Volumes are functions of
position and time, evaluated only on the moving plane of view, so a frame costs no more than an image.
"""

from collections.abc import Iterator

import numpy as np

KINDS = ("bodies", "cells", "vessels", "texture", "heart")
FRAMES = 9


def draw(kind: str, size: int, rng: np.random.Generator, frames: int = FRAMES) -> np.ndarray:
    """Return one video of a kind.

    Args:
        kind: one of :data:`KINDS`.
        size: pixels per side.
        rng: random generator.
        frames: number of frames.

    Returns:
        Gray values in [0, 1], float32 of shape (frames, size, size).

    Raises:
        ValueError: `kind` is unknown.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    return np.clip(_GENERATORS[kind](size, frames, rng), 0.0, 1.0).astype(np.float32)


View = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Coordinates of pixels, in units of the frame width: z (frames, 1, 1), y (frames, size, 1), x (frames, 1, size)."""


def _flight(size: int, frames: int, rng: np.random.Generator) -> View:
    """Return the view of a flight into the volume at constant speed and sideways drift, centered at z = 0."""
    time = np.arange(frames, dtype=np.float32)[:, None, None] - (frames - 1) / 2
    axis = (np.arange(size, dtype=np.float32) + 0.5) / size
    heading, drift = rng.uniform(0, 2 * np.pi), rng.uniform(0.004, 0.018)
    down, right = drift * np.sin(heading), drift * np.cos(heading)
    return rng.uniform(0.015, 0.03) * time, axis[:, None] + down * time, axis + right * time


def _step(value: np.ndarray) -> np.ndarray:
    """Return a smooth step from 0 to 1."""
    return 0.5 + 0.5 * np.tanh(value / 2)


def _waves(view: View, low: float, high: float, rng: np.random.Generator, along: float = 1.0) -> np.ndarray:
    """Return a sum of plane waves of unit variance.

    Args:
        view: coordinates of the pixels.
        low: lowest frequency, in cycles per frame.
        high: highest frequency, in cycles per frame.
        rng: random generator.
        along: factor on frequencies along a random direction; values below 1 make fibers.
    """
    z, y, x = view
    count, angle = 16, rng.uniform(0, np.pi)
    total = 0.0
    for _ in range(count):
        heading, frequency = rng.uniform(0, 2 * np.pi), 2 * np.pi * rng.uniform(low, high)
        fiber, across = along * np.cos(heading), np.sin(heading)
        ky = frequency * (fiber * np.cos(angle) - across * np.sin(angle))
        kx = frequency * (fiber * np.sin(angle) + across * np.cos(angle))
        total = total + np.sin(ky * y + kx * x + 0.5 * frequency * rng.uniform(-1, 1) * z + rng.uniform(0, 2 * np.pi))
    return total * np.sqrt(2 / count)


def _bodies(size: int, frames: int, rng: np.random.Generator) -> np.ndarray:
    z, y, x = view = _flight(size, frames, rng)
    image = 0.32 + 0.03 * _waves(view, 0.5, 2, rng)
    for _ in range(rng.integers(10, 19)):
        (cy, cx), cz = rng.uniform(-0.05, 1.05, 2), rng.uniform(-0.2, 0.2)
        long, angle = rng.uniform(0.1, 0.2), rng.uniform(0, np.pi)
        short, deep = long * rng.uniform(0.6, 1.0), long * rng.uniform(0.7, 1.2)
        dy, dx = y - cy, x - cx
        u, v = dy * np.cos(angle) + dx * np.sin(angle), dx * np.cos(angle) - dy * np.sin(angle)
        radius = np.sqrt((u / long) ** 2 + (v / short) ** 2 + ((z - cz) / deep) ** 2)
        inside, nucleus = _step((1 - radius) * 18), _step((0.45 - radius) * 18)
        image = image * (1 - inside) + rng.uniform(0.65, 0.92) * inside - 0.35 * nucleus
    return image


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
    image = 0.65 + 0.03 * _waves(view, 0.5, 2, rng)
    inside = np.full((frames, size, size), -1.0, np.float32)
    for (cy, cx), cz, width in _tubes(rng):
        inside = np.maximum(inside, width - np.sqrt((z - cz) ** 2 + (y - cy) ** 2 + (x - cx) ** 2))
    return image + (0.12 - image) * _step(inside * 150)


def _tubes(rng: np.random.Generator) -> Iterator[tuple[np.ndarray, float, float]]:
    """Yield points (y, x), z and radius along vessels that cross the frame and branch."""
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
    """Return a dark chamber whose bright wall thickens as the chamber contracts; about one beat per video."""
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


_GENERATORS = {"bodies": _bodies, "cells": _cells, "vessels": _vessels, "texture": _texture, "heart": _heart}
