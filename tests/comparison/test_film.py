"""Videos side by side, in an animated picture and as strips of their frames."""

from pathlib import Path

import numpy as np
import pytest

from xfuser_cocodiff.comparison import film


def videos(count: int, frames: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, frames, *shape), dtype=np.uint8)


@pytest.mark.parametrize(("name", "channels"), [("film.gif", ()), ("film.png", (3,))])
def test_all_frames_of_all_videos_run_as_they_are(tmp_path: Path, name: str, channels: tuple[int, ...]) -> None:
    rows = {"stock": videos(2, 5, 16, 24, *channels), "fast": videos(2, 5, 16, 24, *channels, seed=1)}
    film.animate(rows, tmp_path / name)
    shown = film.read(tmp_path / name)
    assert shown.shape[:2] == (5, 2 * 16)
    for number, row in enumerate(rows.values()):
        beside_names = shown[:, 16 * number : 16 * (number + 1), -2 * 24 :]
        wanted = np.concatenate([*row], axis=2)
        assert np.array_equal(beside_names, wanted if channels else np.stack([wanted] * 3, -1))
    assert (shown[:, :, : -2 * 24] < 128).any()


def test_frames_that_stand_still_are_read_for_as_long_as_they_are_shown(tmp_path: Path) -> None:
    rows = {"still": np.repeat(videos(1, 2, 8, 8), 3, axis=1)}
    film.animate(rows, tmp_path / "film.png")
    assert np.array_equal(film.read(tmp_path / "film.png")[:, :, -8:, 0], rows["still"][0])


def test_strips_have_the_frames_of_a_video_below_those_of_other_modes() -> None:
    short = {"stock": videos(2, 9, 4, 4), "fast": videos(2, 9, 4, 4, seed=1)}
    shown = film.strips(short)
    assert [*shown] == ["stock, 1", "fast, 1", "stock, 2", "fast, 2"]
    assert np.array_equal(shown["fast, 2"], short["fast"][1])
    long = film.strips({"stock": videos(5, 81, 4, 4)})
    assert [*long] == ["stock, 1", "stock, 2", "stock, 3"]
    assert np.array_equal(long["stock, 1"], videos(5, 81, 4, 4)[0, ::10])
