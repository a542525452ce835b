"""`cocodiff tables`: what a campaign of scripts/aurora found, as tables."""

import argparse
import json
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli.answer import fail


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "tables",
        help="the tables of a campaign of scripts/aurora",
        description="Writes tables.md and tables.json into the folder of a campaign, and lists what has not finished.",
        epilog="Exit status: 1 when a cell failed or is missing.",
    )
    parser.add_argument("folder", type=Path, help="of the campaign")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    from xfuser_cocodiff.comparison import tables

    try:
        record = tables.collect(options.folder)
    except ValueError as error:
        return fail(str(error))
    (options.folder / "tables.json").write_text(json.dumps({**record, "command": options.command}, indent=2) + "\n")
    file = options.folder / "tables.md"
    file.write_text(tables.markdown(record))
    unfinished = [cell for cell in record["cells"] if cell["state"] != tables.FINISHED]
    for cell in unfinished:
        status = "" if cell["status"] is None else f", exit status {cell['status']}"
        print(f"{cell['name']}: {cell['state']}{status}")
    print(f"{len(record['cells']) - len(unfinished)} of {len(record['cells'])} cells have finished; tables: {file}")
    return 1 if unfinished else 0
