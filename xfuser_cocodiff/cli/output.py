"""What every command answers with: an exit status, an error, a record."""

import argparse
import json
import sys
from typing import Any

USAGE_STATUS = 2


def fail(message: str) -> int:
    """Say what was wrong with the command line, and return the exit status for that."""
    print(f"cocodiff: {message}", file=sys.stderr)
    return USAGE_STATUS


def write_json(options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Write a record where --json says, if it is given."""
    if options.json is None:
        return
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({**record, "command": options.command}, indent=2) + "\n")
