"""Videos that run side by side in one animated picture, and frames of them beside each other."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from xfuser_cocodiff.comparison.strip import FRAME_MILLISECONDS

STRIP_VIDEOS, STRIP_FRAMES = 3, 9
_MARGIN = 6
"""Pixels around names."""


def animate(rows: Mapping[str, np.ndarray], out: Path) -> None:
    """Save videos of equal shape that run together: a row for each name, a column for each video.

    Frames that are equal to the one before become one that is shown for longer.

    Args:
        rows: bytes (N, frames, height, width), or with 3 channels behind, by what stands beside them.
        out: a GIF, which is exact for grey values, or a PNG.
    """
    from PIL import Image, ImageDraw, ImageFont

    count, frames, height, width = next(iter(rows.values())).shape[:4]
    font = ImageFont.load_default(max(11, height // 12))
    left = int(max(map(font.getlength, rows))) + 2 * _MARGIN
    mode = "L" if next(iter(rows.values())).ndim == 4 else "RGB"
    page = Image.new(mode, (left + count * width, len(rows) * height), "white")
    for number, name in enumerate(rows):
        place = left - _MARGIN, number * height + height // 2
        ImageDraw.Draw(page).text(place, name, fill="black", font=font, anchor="rm")
    pages = [page.copy() for _ in range(frames)]
    for number, videos in enumerate(rows.values()):
        for column, video in enumerate(videos):
            for shown, frame in zip(pages, video, strict=True):
                shown.paste(Image.fromarray(frame), (left + column * width, number * height))
    # An optimised GIF marks pixels that stay by a colour, which it takes from the 256 shades of grey.
    more = {"duration": FRAME_MILLISECONDS, "loop": 0, "optimize": False}
    pages[0].save(out, save_all=True, append_images=pages[1:], **more)


def read(file: Path) -> np.ndarray:
    """The frames of an animated picture, bytes (frames, height, width, 3)."""
    from PIL import Image, ImageSequence

    with Image.open(file) as film:
        shown = [
            (np.asarray(frame.convert("RGB")), frame.info.get("duration", FRAME_MILLISECONDS))
            for frame in ImageSequence.Iterator(film)
        ]
    return np.stack([frame for frame, duration in shown for _ in range(max(1, round(duration / FRAME_MILLISECONDS)))])


def strips(rows: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Frames of the first videos, one video with all names after the other; of a long video some, from first to last.

    Args:
        rows: videos (N, frames, height, width) by name.
    """
    length = next(iter(rows.values())).shape[1]
    chosen = np.linspace(0, length - 1, min(length, STRIP_FRAMES)).round().astype(int)
    count = min(STRIP_VIDEOS, *map(len, rows.values()))
    return {f"{name}, {n + 1}": videos[n, chosen] for n in range(count) for name, videos in rows.items()}
