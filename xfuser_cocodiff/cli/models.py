"""`cocodiff models`: small models under the real names, and what the plugin does in each of xDiT's."""

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli.output import fail


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser("models", help="small models under the real names, and what is done in each model")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="DIR", help="what HF_HOME is to be")
    what.add_argument("--list", action="store_true", help="instead, what the plugin does in each of xDiT's models")
    parser.add_argument("--json", action="store_true", help="with --list: as a record")
    parser.add_argument("names", nargs="*", metavar="NAME", help="names in xDiT's registry (default: all small models)")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    if options.list:
        return _list(options)
    if options.json:
        return fail("--json goes with --list")
    from xfuser_cocodiff.lab.models import hub

    try:
        written = hub.write_cache(options.out, options.names or None)
    except (ValueError, OSError) as error:
        return fail(str(error))
    for name, folder in written.items():
        print(f"{name}: {folder}")
    out = options.out.resolve()
    print(f"Use them with: HF_HOME={out} HF_HUB_OFFLINE=1 xdit --model {next(iter(written))} ...")
    if editing := [name for name in written if hub.REGISTRY[name].edits]:
        print(f"{', '.join(editing)} with: --input_images {out / hub.INPUT_IMAGE}")
    filming = [name for name in written if hub.REGISTRY[name].films]
    if filming and not find_spec("imageio_ffmpeg"):
        print(f"{', '.join(filming)} after: pip install imageio imageio-ffmpeg, with which diffusers saves videos")
    return 0


def _list(options: argparse.Namespace) -> int:
    from xfuser_cocodiff.lab.models import families

    if options.names:
        return fail(f"--list takes no names, and was given {', '.join(options.names)}")
    if options.json:
        from xfuser_cocodiff.lab.reporting import host

        print(json.dumps({**host.header(), "rows": families.rows(), "command": options.command}, indent=2))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(*families.COLUMNS, box=None)
    for cells in families.cells():
        table.add_row(*cells)
    Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200).print(table)
    return 0
