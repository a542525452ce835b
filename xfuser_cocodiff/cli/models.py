"""`cocodiff models`: writes small models to test with, or lists the support of each model."""

import argparse
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli.output import fail


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the parser."""
    parser = subparsers.add_parser(
        "models",
        help="write small models to test with, or list the support of all models",
        description="Writes small models, under the names of the real ones, as a Hugging Face cache. With --list, "
        "shows what the plugin supports in each model of xDiT.",
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path, metavar="DIR", help="folder to write the cache to, for HF_HOME")
    action.add_argument("--list", action="store_true", help="list the support of all models in xDiT's registry")
    parser.add_argument("--json", action="store_true", help="print the list as a record in JSON; requires --list")
    parser.add_argument("names", nargs="*", metavar="NAME", help="names in xDiT's registry (default: all small models)")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
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
    print(f"To use them: HF_HOME={out} HF_HUB_OFFLINE=1 xdit --model {next(iter(written))} ...")
    if editing_models := [name for name in written if hub.REGISTRY[name].takes_image]:
        print(f"{', '.join(editing_models)} also need: --input_images {out / hub.INPUT_IMAGE}")
    video_models = [name for name in written if hub.REGISTRY[name].makes_video]
    if video_models and not find_spec("imageio_ffmpeg"):
        print(f"To save the videos of {', '.join(video_models)}: pip install imageio imageio-ffmpeg")
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
