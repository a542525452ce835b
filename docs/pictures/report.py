"""Draw report.svg, the annotated report in report.md: python docs/pictures/report.py"""

from pathlib import Path
from xml.sax.saxutils import escape

ROWS = (
    ("", "step time", "speedup", "sent between nodes", "PSNR to stock", "result"),
    ("stock", "505 ms (496 to 508)", "-", "0.88 MB", "-", "-"),
    ("exact", "464 ms (463 to 473)", "1.09x", "0.88 MB", "equal", "bit-identical"),
    ("balanced", "192 ms (187 to 204)", "2.62x", "0.15 MB", "54.0 dB", "lossy"),
    ("fast", "190 ms (189 to 195)", "2.65x", "0.12 MB", "53.8 dB", "lossy"),
)
"""The table of the demo's report, as in docs/benchmarks.md."""
COLUMNS = (4, 70, 206, 272, 398, 500)
BARS = ((524, 414), (475, 365), (196, 86), (215, 105))
"""Milliseconds of each bar, and of its communication; the latter are a sketch."""
STEP = ("Step time, median of 3 repeats", "Communication", "Bytes sent per rank", "Peak memory per rank")
COMPARED = ("Bit-identical", "Largest difference", "PSNR", "SSIM")
CALLOUTS = (
    ("Verdict", "speedup and fidelity in a sentence; red: a lossless run differs from stock"),
    ("Speed", "median and range of the repeats"),
    ("Quality", "PSNR of the image; bit-identical is by the final latents"),
    ("Images", "look here before you trust a PSNR"),
    ("Colors", "all-to-alls by axis; in stock's bar, what the plugin can save"),
    ("Gray", "computation and everything else"),
    ("Warnings", "reasons not to trust the figures, such as an unstable seed"),
    ("Details", "communication, bytes, memory"),
    ("Differences", "of latents and image, for each mode"),
)
WIDTH, PANEL, MARGIN = 940, 610, 12
INK, FAINT, LINE, MARK = "#202124", "#667079", "#dfe3e7", "#1f7a4d"
EDGE = PANEL + 8
COLORED, REST = "#c8553d", "#b8bec6"
CALLOUT = "#1a56b0"


def draw() -> str:
    """Return the picture as SVG."""
    parts, marks = [_text(MARGIN + 4, 34, "CoCoDiff compared to stock xDiT", FAINT, weight="bold")], []
    parts += [
        _box(MARGIN + 4, 46, 4, 30, MARK),
        _text(MARGIN + 16, 66, "exact: speedup 1.09x, bit-identical; ...", MARK),
    ]
    marks.append((66, EDGE))
    top = 100
    for number, row in enumerate(ROWS):
        base = top + 20 * number
        parts += [_text(MARGIN + x, base, cell, INK if number else FAINT) for x, cell in zip(COLUMNS, row, strict=True)]
        parts.append(f'<path d="M{MARGIN + 4} {base + 6} H{PANEL - 8}" stroke="{LINE}"/>')
    marks += [(top + 20, EDGE), (top + 70, EDGE)]
    parts.append(_text(MARGIN + 4, 226, "Images", INK, weight="bold"))
    for number, row in enumerate(ROWS[1:]):
        parts.append(_box(MARGIN + 4 + 145 * number, 236, 130, 64, "#f5f6f8", LINE))
        parts.append(_text(MARGIN + 69 + 145 * number, 272, row[0], FAINT, anchor="middle"))
    marks.append((268, EDGE))
    parts.append(_text(MARGIN + 4, 330, "Step time", INK, weight="bold"))
    for number, (total, sent) in enumerate(BARS):
        base, scale = 344 + 22 * number, 0.85
        parts.append(_text(MARGIN + 4, base + 11, ROWS[number + 1][0], FAINT))
        parts.append(_box(MARGIN + 78, base, sent * scale, 14, COLORED))
        parts.append(_box(MARGIN + 78 + sent * scale, base, (total - sent) * scale, 14, REST))
    marks += [(351, EDGE), (406, EDGE)]
    parts.append(_text(MARGIN + 4, 458, "balanced in detail", INK, weight="bold"))
    parts += [_box(MARGIN + 4, 468, 4, 30, FAINT), _text(MARGIN + 16, 488, "Not bit-identical to stock", FAINT)]
    marks.append((484, EDGE))
    for names, left, head in ((STEP, MARGIN + 4, "Per step"), (COMPARED, 330, "balanced compared to stock")):
        for number, name in enumerate((head, *names)):
            parts.append(_text(left, 522 + 20 * number, name, INK if number else FAINT))
            parts.append(f'<path d="M{left} {528 + 20 * number} h{266 if left > 300 else 290}" stroke="{LINE}"/>')
    marks += [(540, EDGE), (600, EDGE)]
    for number, ((y, x), (name, meaning)) in enumerate(zip(marks, CALLOUTS, strict=True), 1):
        parts += _callout(number, x, y, name, meaning)
    height = 630
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
    head += 'font-size="12">'
    frame = [_box(0, 0, WIDTH, height, "#ffffff"), _box(MARGIN - 4, 12, PANEL, height - 24, "#ffffff", LINE)]
    return "\n".join([head, *frame, *parts, "</svg>"]) + "\n"


def _callout(number: int, x: float, y: float, name: str, meaning: str) -> list[str]:
    """Return a numbered circle in the report, and its explanation beside it."""
    first, second = _halves(meaning)
    left = PANEL + 46
    return [
        f'<path d="M{x + 9} {y - 4} H{left - 20}" stroke="{CALLOUT}"/>',
        f'<circle cx="{x}" cy="{y - 4}" r="9" fill="{CALLOUT}"/>',
        _text(x, y, str(number), "#ffffff", anchor="middle", weight="bold"),
        _text(left - 14, y - 12, f"{number}. {name}", CALLOUT, weight="bold"),
        _text(left - 14, y + 2, first),
        *([_text(left - 14, y + 16, second)] if second else []),
    ]


def _halves(text: str, width: int = 44) -> tuple[str, str]:
    """Return a text in two lines of at most so many characters."""
    if len(text) <= width:
        return text, ""
    cut = text.rindex(" ", 0, width + 1)
    return text[:cut], text[cut + 1 :]


def _box(left: float, top: float, width: float, height: float, color: str, line: str = "none") -> str:
    place = f'x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} fill="{color}" stroke="{line}"/>'


def _text(left: float, base: float, text: str, color: str = INK, anchor: str = "start", weight: str = "normal") -> str:
    place = f'x="{left:g}" y="{base:g}" text-anchor="{anchor}" font-weight="{weight}" fill="{color}"'
    return f"<text {place}>{escape(text)}</text>"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw())
