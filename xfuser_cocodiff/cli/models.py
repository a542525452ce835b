"""`cocodiff models`: small models under the real names."""

import argparse
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli.answer import fail


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser("models", help="write small models under the real names as a Hugging Face cache")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="what HF_HOME is to be")
    parser.add_argument("names", nargs="*", metavar="NAME", help="names in xDiT's registry (default: all small models)")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    from xfuser_cocodiff.models import hub

    try:
        written = hub.write_cache(options.out, options.names or None)
    except (ValueError, OSError) as error:
        return fail(str(error))
    for name, folder in written.items():
        print(f"{name}: {folder}")
    print(f"Use them with: HF_HOME={options.out.resolve()} HF_HUB_OFFLINE=1 xdit --model {next(iter(written))} ...")
    return 0
