"""Output that all subcommands have in common: errors and records."""

import argparse
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

USAGE_STATUS = 2


def fail(message: str) -> int:
    """Print an error of the command line and return its exit status."""
    print(f"cocodiff: {message}", file=sys.stderr)
    return USAGE_STATUS


def write_json(options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Write a record to the file of --json, if it is given; the file is replaced atomically."""
    if options.json is None:
        return
    text = json.dumps({**record, "command": options.command}, indent=2) + "\n"
    try:
        _write(options.json, text)
    except OSError as error:
        raise SystemExit(fail(f"--json {options.json}: {error.strerror}; name a file that can be written")) from None


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.exists() and not file.is_file():  # such as /dev/stdout
        file.write_text(text)
        return
    file = file.resolve()
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(text)
    partial.replace(file)


def positive(text: str) -> int:
    """Return a number of at least 1, for the parser of the command line.

    Raises:
        argparse.ArgumentTypeError: it is not one.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid; valid are integers from 1")
    return int(text)


def silence_libraries() -> None:
    """Turn off the import messages of other libraries, and their warnings on all ranks but the first."""
    is_first = os.environ.get("RANK", "0") == "0"
    os.environ.setdefault("LOG_LEVEL", "warning" if is_first else "error")  # xDiT's
    for library in ("TRANSFORMERS", "DIFFUSERS"):
        os.environ.setdefault(f"{library}_VERBOSITY", "error")
    if not is_first:
        warnings.simplefilter("ignore")
