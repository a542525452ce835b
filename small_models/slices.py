"""Generates images that resemble slices of X-ray micro-tomography: bodies, cells, vessels, texture.

They replace the mouse-brain slices that the CoCoDiff paper inpaints, which cannot be distributed. A small model trained
on them follows a real denoising trajectory, and the ground truth of every image is known.
"""

import numpy as np

KINDS = ("bodies", "cells", "vessels", "texture")


def draw(kind: str, size: int, rng: np.random.Generator) -> np.ndarray:
    """Return one slice of a kind.

    Args:
        kind: one of :data:`KINDS`.
        size: pixels per side.
        rng: random generator.

    Returns:
        Gray values in [0, 1], float32 of shape (size, size).

    Raises:
        ValueError: `kind` is unknown.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
    image = _GENERATORS[kind](size, rng)
    image = image + 0.02 * rng.standard_normal((size, size))
    return np.clip(image, 0.0, 1.0).astype(np.float32)


def _grid(size: int) -> tuple[np.ndarray, np.ndarray]:
    axis = (np.arange(size) + 0.5) / size
    return np.meshgrid(axis, axis, indexing="ij")


def _step(value: np.ndarray) -> np.ndarray:
    """Return a smooth step from 0 to 1."""
    return 0.5 + 0.5 * np.tanh(value / 2)


def _field(size: int, low: float, high: float, rng: np.random.Generator, stretch: float = 1.0) -> np.ndarray:
    """Return band-passed Gaussian noise of unit variance, shape (size, size).

    Args:
        size: pixels per side.
        low: lowest frequency, in cycles per image.
        high: highest frequency, in cycles per image.
        rng: random generator.
        stretch: factor on frequencies along a random direction; values below 1 make fibers.
    """
    fy, fx = np.meshgrid(np.fft.fftfreq(size) * size, np.fft.fftfreq(size) * size, indexing="ij")
    angle = rng.uniform(0, np.pi)
    along, across = fy * np.cos(angle) + fx * np.sin(angle), fx * np.cos(angle) - fy * np.sin(angle)
    radius = np.hypot(along * stretch, across)
    band = np.exp(-((radius / high) ** 2)) - np.exp(-((radius / low) ** 2))
    field = np.fft.ifft2(np.fft.fft2(rng.standard_normal((size, size))) * band).real
    return field / (field.std() + 1e-6)


def _bodies(size: int, rng: np.random.Generator) -> np.ndarray:
    y, x = _grid(size)
    image = 0.35 + 0.04 * _field(size, 1, 6, rng)
    for _ in range(rng.integers(5, 14)):
        cy, cx = rng.uniform(0, 1, 2)
        long, angle = rng.uniform(0.05, 0.15), rng.uniform(0, np.pi)
        short = long * rng.uniform(0.55, 1.0)
        dy, dx = y - cy, x - cx
        u, v = dy * np.cos(angle) + dx * np.sin(angle), dx * np.cos(angle) - dy * np.sin(angle)
        radius = np.hypot(u / long, v / short)
        inside = _step((1 - radius) * 18)
        nucleus = _step((0.4 - radius) * 18)
        shade = rng.uniform(0.62, 0.92)
        image = image * (1 - inside) + shade * inside - 0.3 * nucleus
    return image


def _cells(size: int, rng: np.random.Generator) -> np.ndarray:
    y, x = _grid(size)
    seeds = rng.uniform(-0.1, 1.1, (rng.integers(14, 34), 2))
    distance = np.hypot(y[..., None] - seeds[:, 0], x[..., None] - seeds[:, 1])
    nearest = distance.argmin(-1)
    first, second = np.partition(distance, 1, axis=-1)[..., :2].transpose(2, 0, 1)
    membrane = np.exp(-(((second - first) / 0.025) ** 2))
    shade = rng.uniform(0.25, 0.55, len(seeds))[nearest]
    return shade * (1 - membrane) + 0.9 * membrane


def _vessels(size: int, rng: np.random.Generator) -> np.ndarray:
    y, x = _grid(size)
    image = 0.6 + 0.05 * _field(size, 2, 10, rng)
    tips = [
        (rng.uniform(0, 1, 2), rng.uniform(0, 2 * np.pi), rng.uniform(0.03, 0.055)) for _ in range(rng.integers(2, 4))
    ]
    while tips:
        point, heading, width = tips.pop()
        for _ in range(60):
            distance = np.hypot(y - point[0], x - point[1])
            image = np.minimum(image, 0.12 + 0.6 * _step((distance - width) * 150))
            heading += rng.normal(0, 0.15)
            point = point + 0.015 * np.array([np.sin(heading), np.cos(heading)])
            if not (-0.1 < point[0] < 1.1 and -0.1 < point[1] < 1.1):
                break
            if width > 0.02 and rng.uniform() < 0.05:
                tips.append((point, heading + rng.choice([-1, 1]) * rng.uniform(0.5, 1.0), width * 0.7))
                width *= 0.85
    return image


def _texture(size: int, rng: np.random.Generator) -> np.ndarray:
    fibers = _field(size, 3, rng.uniform(7, 13), rng, stretch=rng.uniform(0.15, 0.4))
    return 0.5 + 0.16 * fibers + 0.05 * _field(size, 1, 3, rng)


_GENERATORS = {"bodies": _bodies, "cells": _cells, "vessels": _vessels, "texture": _texture}
