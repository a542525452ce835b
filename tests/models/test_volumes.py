"""Procedural volumes that the small Wan was trained on: what is drawn is a video of its kind."""

import numpy as np
import pytest

from xfuser_cocodiff.models import captions, volumes


@pytest.mark.parametrize("kind", volumes.KINDS)
def test_videos_move_and_follow_their_seed(kind: str) -> None:
    first, again, other = (volumes.draw(kind, 64, np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert (first.shape, first.dtype) == ((volumes.FRAMES, 64, 64), np.float32)
    assert 0 <= first.min() < first.max() <= 1
    assert np.array_equal(first, again)
    assert np.abs(first - other).mean() > 0.05
    steps, whole = np.abs(np.diff(first, axis=0)).mean((1, 2)), np.abs(first[-1] - first[0]).mean()
    assert (steps > 0).all(), "a frame stands still"
    assert kind == "heart" or steps.max() < whole, "motion is not steady"


def test_a_wider_picture_shows_the_same() -> None:
    small, large = (volumes.draw("bodies", size, np.random.default_rng(3)) for size in (32, 128))
    assert np.abs(large.reshape(-1, 32, 4, 32, 4).mean((2, 4)) - small).mean() < 0.02


def test_every_kind_has_a_caption_and_others_are_refused() -> None:
    assert {*captions.VOLUMES} == {*volumes.KINDS}
    with pytest.raises(ValueError, match=r"kind must be one of bodies.*not 'cats'"):
        volumes.draw("cats", 32, np.random.default_rng(0))
