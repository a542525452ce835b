"""Reads records of measurements, which are larger than settings."""

from pathlib import Path
from typing import Any

from xfuser_cocodiff.engine.topology import json_file

_MAX_BYTES = 1024 * 2**20
"""Largest record, which has entries for each step and layer."""


def read(file: Path) -> Any:
    """Return the values of a record; see :func:`json_file.read`."""
    return json_file.read(file, _MAX_BYTES)
