"""Pictures inside a page, so that a report needs no other file."""

import base64
from pathlib import Path

_MEDIA_TYPES = {".png": "image/png", ".svg": "image/svg+xml"}


def embed(file: Path) -> str:
    """A picture as a data URL."""
    return f"data:{_MEDIA_TYPES[file.suffix]};base64,{base64.b64encode(file.read_bytes()).decode()}"
