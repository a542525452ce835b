"""Provides `cocodiff models`: writes small models, and lists what the plugin supports in each model of xDiT."""

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli.output import fail


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser("models", help="write small models, or list the supported models")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path, metavar="DIR", help="write small models to this folder, for HF_HOME")
    action.add_argument("--list", action="store_true", help="list what the plugin supports in each model of xDiT")
    parser.add_argument("--json", action="store_true", help="with --list: print a record")
    parser.add_argument("names", nargs="*", metavar="NAME", help="names in xDiT's registry (default: all small models)")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    if options.list:
        return _list(options)
    if options.json:
        return fail("--json requires --list")
    from xfuser_cocodiff.lab.models import hub

    try:
        written = hub.write_cache(options.out, options.names or None)
    except (ValueError, OSError) as error:
        return fail(str(error))
    for name, folder in written.items():
        print(f"{name}: {folder}")
    out = options.out.resolve()
    print(f"Use them with: HF_HOME={out} HF_HUB_OFFLINE=1 xdit --model {next(iter(written))} ...")
    if with_image := [name for name in written if hub.REGISTRY[name].takes_image]:
        print(f"{', '.join(with_image)} with: --input_images {out / hub.INPUT_IMAGE}")
    with_video = [name for name in written if hub.REGISTRY[name].makes_video]
    if with_video and not find_spec("imageio_ffmpeg"):
        print(f"{', '.join(with_video)} after: pip install imageio imageio-ffmpeg, with which diffusers saves videos")
    return 0


def _list(options: argparse.Namespace) -> int:
    from xfuser_cocodiff.lab.models import families

    if options.names:
        return fail(f"--list takes no names, got {', '.join(options.names)}")
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
