"""Draw other_methods.svg, error against bits in other_methods.md: python docs/pictures/other_methods.py"""

import math
from pathlib import Path

POINTS = (
    ("balanced", 3.9, 2.1, True),
    ("fast", 2.8, 4.8, True),
    ("FP8", 8.0, 2.2, False),
    ("FP4", 4.5, 9.5, False),
    ("residuals, 4 bits", 5.6, 1.5, False),
    ("2 bits", 3.9, 6.6, False),
    ("1 bit", 3.0, 15.0, False),
)
"""Name, bits per value, error in percent, and whether it is ours: the table of the page."""
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 340, 64, 290, 20
BITS, ERRORS = (2, 9), (1, 20)
INK, LINE, OURS, OTHERS = "#202124", "#dfe3e7", "#1f7a4d", "#8a8f98"


def draw() -> str:
    """Return the picture as SVG."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
    parts = [f'{head}font-size="13">', f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>']
    for bits in range(BITS[0], BITS[1] + 1):
        parts += [_line(_x(bits), TOP, _x(bits), BOTTOM), _text(_x(bits), BOTTOM + 18, str(bits), anchor="middle")]
    for error in (1, 2, 5, 10, 20):
        parts += [_line(LEFT, _y(error), _x(BITS[1]), _y(error)), _text(LEFT - 8, _y(error) + 4, f"{error} %", "end")]
    parts.append(_text((LEFT + _x(BITS[1])) / 2, BOTTOM + 40, "bits per value sent", "middle"))
    for name, bits, error, is_ours in POINTS:
        color, weight = (OURS, "bold") if is_ours else (OTHERS, "normal")
        parts.append(f'<circle cx="{_x(bits):g}" cy="{_y(error):g}" r="6" fill="{color}"/>')
        parts.append(_text(_x(bits) + 11, _y(error) + 4, name, weight=weight))
    return "\n".join([*parts, "</svg>", ""])


def _x(bits: float) -> float:
    return round(LEFT + (bits - BITS[0]) / (BITS[1] - BITS[0]) * (WIDTH - LEFT - 24), 1)


def _y(error: float) -> float:
    low, high = map(math.log, ERRORS)
    return round(BOTTOM - (math.log(error) - low) / (high - low) * (BOTTOM - TOP), 1)


def _line(x: float, y: float, to_x: float, to_y: float) -> str:
    return f'<path d="M{x:g} {y:g} L{to_x:g} {to_y:g}" stroke="{LINE}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-weight="{weight}" fill="{INK}"'
    return f"<text {place}>{text}</text>"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw())
