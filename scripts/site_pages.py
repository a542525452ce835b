"""MkDocs hook: pages of the site that lie outside of docs/."""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

REPOSITORY = Path(__file__).parent.parent
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "patches/README.md": "patches.md",
}
"""Pages of the repository that are pages of the site, by their places there."""
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that do not lie in docs/."""
    for source, place in OUTSIDE.items():
        text = (REPOSITORY / source).read_text()
        files.append(File.generated(config, place, content=relinked(text, source, place)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links of docs/ lead to places of the site."""
    place = page.file.src_uri
    return markdown if page.file.generated_by else relinked(markdown, f"docs/{place}", place)


def relinked(text: str, source: str, place: str) -> str:
    """Return a page with its relative links as they are on the site.

    Args:
        text: the page.
        source: its path in the repository.
        place: its path on the site.
    """

    def link(found: re.Match) -> str:
        target, hash_, anchor = found[2].partition("#")
        if not target or re.match(r"[a-z]+:", target):
            return found[0]
        path = os.path.normpath(os.path.join(os.path.dirname(source), target))
        there = OUTSIDE.get(path, path.removeprefix("docs/"))
        return f"{found[1]}{os.path.relpath(there, os.path.dirname(place) or '.')}{hash_}{anchor}{found[3]}"

    return _LINK.sub(link, text)
