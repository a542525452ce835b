"""Writes tables and links to pictures into the marked places of a Markdown page."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path


def replace_parts(page: str, parts: Mapping[str, Sequence[str]]) -> str:
    """Return a page with the text between `<!-- NAME -->` and `<!-- /NAME -->` replaced by the part of that name.

    Args:
        page: the page.
        parts: lines of each part by name; all names must be marked in the page.

    Raises:
        ValueError: a mark is missing.
    """
    for name, lines in parts.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, has_begin, rest = page.partition(begin)
        _, has_end, after = rest.partition(end)
        if not has_begin or not has_end:
            raise ValueError(f"the page has no place for a table between {begin} and {end}")
        page = before + "\n".join([begin, *lines, end]) + after
    return page


def picture_lines(files: Sequence[Path], page: Path) -> list[str]:
    """Return links to the pictures of machines, for a page, with a line for each."""
    lines = []
    for file in files:
        machine = re.sub(r"^[^-]*-", "", file.stem)
        lines.append(f"![{machine}]({os.path.relpath(file, page.parent)})")
    return lines
