"""Expected PSNR: the figures of the documentation, found by mode, steps, guidance and exchange."""

import re
from pathlib import Path

import pytest

from xfuser_cocodiff.engine.compression.expected_quality import GUIDED, MEASURED, UNGUIDED, expected_psnr

PAGE = Path(__file__).parents[3] / "docs/quality.md"
ROW = re.compile(
    r"^\| (?P<model>\S*) ?\| (?P<steps>\d*) ?\| `(?P<mode>\w+)` \|[^|\n]*\|([^|\n]*)\|[^|\n]*\|([^|\n]*)\|$",
    re.MULTILINE,
)


def figures_of_page() -> dict[tuple[str, str], dict[int, tuple[float, float]]]:
    """Return the PSNR of the page's table of modes, gathered and by heads; empty cells repeat those above."""
    found: dict[tuple[str, str], dict[int, tuple[float, float]]] = {}
    model, steps = "", 0
    for row in ROW.finditer(PAGE.read_text().partition("\n## Modes\n")[2]):
        model, steps = row["model"] or model, int(row["steps"] or steps)
        if row["mode"] != "paper":
            gathered, by_heads = (float(cell.partition("±")[0]) for cell in row.groups()[-2:])
            found.setdefault((model, row["mode"]), {})[steps] = (gathered, by_heads)
    return found


def test_figures_are_those_of_the_documentation() -> None:
    assert figures_of_page() == MEASURED
    assert {model for model, _ in MEASURED} == {*UNGUIDED, *GUIDED}


@pytest.mark.parametrize("gathers_kv", [True, False])
def test_other_lengths_have_the_psnr_of_the_next_shorter_run(gathers_kv: bool) -> None:
    of = {total: expected_psnr("balanced", total, True, gathers_kv) for total in (3, 4, 7, 8, 40, 50, 1000)}
    assert of[7] == of[4] != of[8] and of[1000] == of[50] != of[40]
    assert not of[3] and not expected_psnr("balanced", None, True, gathers_kv)
    assert set(of[8]) == {*GUIDED} and set(expected_psnr("fast", 8, False, gathers_kv)) == {*UNGUIDED}


def test_modes_with_the_same_floor_and_modes_without_one() -> None:
    assert expected_psnr("auto", 20, False, True) == expected_psnr("balanced", 20, False, True)
    assert not expected_psnr("paper", 20, False, True) and not expected_psnr("exact", 20, True, True)
