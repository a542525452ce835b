"""Draw demo.png, the picture of the README, from the report of scripts/demo.sh: python docs/demo.py cocodiff-report"""

import json
import sys
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

PICTURE = Path(__file__).with_name("demo.png")
TILE, GAP, CAPTION = 128, 16, 76
BACKGROUND, INK, FAINT = "#ffffff", "#202124", "#5f6368"


def draw(folder: Path) -> Image.Image:
    """Return the images of each variant in a column, with the time of a step and the error below."""
    runs = json.loads((folder / "report.json").read_text())["runs"]
    column = 2 * TILE
    picture = Image.new("RGB", (len(runs) * (column + GAP) + GAP, GAP + column + CAPTION), BACKGROUND)
    canvas = ImageDraw.Draw(picture)
    for number, run in enumerate(runs):
        left = GAP + number * (column + GAP)
        strip = Image.open(folder / run["image"]["path"])
        for index in range(4):
            tile = strip.crop((index * TILE, 0, (index + 1) * TILE, TILE))
            picture.paste(tile, (left + index % 2 * TILE, GAP + index // 2 * TILE))
        for line, (text, color) in enumerate(zip(_caption(run), (INK, INK, FAINT), strict=True)):
            place = (left + column / 2, GAP + column + 18 + 21 * line)
            canvas.text(place, text, color, ImageFont.load_default(17), anchor="mm")
    return picture


def _caption(run: dict[str, Any]) -> tuple[str, str, str]:
    """Return the name of a variant, the time of its step and what its values lose."""
    error = "bit-identical" if run["mean_error"] is None else f"error {run['mean_error']:.1%}"
    return (
        run["name"],
        f"{1000 * run['step_seconds_spread']['median']:.0f} ms a step",
        "" if run["name"] == "stock" else error,
    )


if __name__ == "__main__":
    draw(Path(sys.argv[1])).save(PICTURE, optimize=True)
