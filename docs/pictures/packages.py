"""Draw packages.svg, the picture of the packages in architecture.md: python docs/pictures/packages.py"""

from pathlib import Path
from xml.sax.saxutils import escape

PACKAGE = "xfuser_cocodiff"
FLOORS = {
    "cli": ("the command: one file per subcommand", "#f3e8ff", ()),
    "tools": (
        "measures and demonstrates: comparison, simulation",
        "#fff4e0",
        ("launching", "reporting", "probing", "accelerator", "simulation", "comparison"),
    ),
    "xdit": (
        "the integration into xDiT",
        "#e6f4ea",
        (
            *("settings", "patching", "platforms", "layers"),
            *("session", "attention", "run_tracking", "integration"),
        ),
    ),
    "engine": (
        "communication and compression; imports no xfuser",
        "#e8f0fe",
        ("topology", "codec", "comm", "compression", "attention", "autotune"),
    ),
}
"""Each floor with its purpose, color and packages, lowest first; a floor imports those below it."""
WIDTH, MARGIN, GAP = 760, 16, 10
BOX_HEIGHT, HEAD_HEIGHT, ARROW = 30, 34, 26
PER_ROW = 4


def draw() -> str:
    """Return the picture as SVG."""
    parts, top = [], MARGIN
    for floor, (purpose, color, packages) in FLOORS.items():
        if top > MARGIN:
            parts.append(_arrow(top))
            top += ARROW
        rows = [packages[start : start + PER_ROW] for start in range(0, len(packages), PER_ROW)]
        height = HEAD_HEIGHT + len(rows) * (BOX_HEIGHT + GAP)
        parts.append(_box(MARGIN, top, WIDTH - 2 * MARGIN, height, color))
        parts.append(_text(2 * MARGIN, top + 22, f"{floor}/", "bold"))
        parts.append(_text(2 * MARGIN + 80, top + 22, purpose))
        width = (WIDTH - 4 * MARGIN - (PER_ROW - 1) * GAP) / PER_ROW
        for row, names in enumerate(rows):
            for column, name in enumerate(names):
                left, box_top = 2 * MARGIN + column * (width + GAP), top + HEAD_HEIGHT + row * (BOX_HEIGHT + GAP)
                parts.append(_box(left, box_top, width, BOX_HEIGHT, "#ffffff"))
                parts.append(_text(left + width / 2, box_top + 20, name, anchor="middle"))
        top += height
    size = f'width="{WIDTH}" height="{top + MARGIN}" viewBox="0 0 {WIDTH} {top + MARGIN}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="14">'
    return "\n".join([head, _box(0, 0, WIDTH, top + MARGIN, "#ffffff", "none"), *parts, "</svg>", ""])


def _box(left: float, top: float, width: float, height: float, color: str, line: str = "#5f6368") -> str:
    place = f'x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" rx="4"'
    return f'<rect {place} fill="{color}" stroke="{line}"/>'


def _text(left: float, base: float, text: str, weight: str = "normal", anchor: str = "start") -> str:
    place = f'x="{left:g}" y="{base:g}" text-anchor="{anchor}" font-weight="{weight}" fill="#202124"'
    return f"<text {place}>{escape(text)}</text>"


def _arrow(top: float) -> str:
    middle, tip = WIDTH / 2, top + ARROW - 4
    line = (
        f"M{middle:g} {top + 4:g} V{tip:g} M{middle - 5:g} {tip - 6:g} L{middle:g} {tip:g} L{middle + 5:g} {tip - 6:g}"
    )
    return "\n".join(
        [f'<path d="{line}" fill="none" stroke="#5f6368"/>', _text(middle + 12, top + ARROW / 2 + 5, "imports")]
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw())
