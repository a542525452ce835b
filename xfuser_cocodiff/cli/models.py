"""`cocodiff models`: small models under the real names."""

import argparse
from importlib.util import find_spec
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
    out = options.out.resolve()
    print(f"Use them with: HF_HOME={out} HF_HUB_OFFLINE=1 xdit --model {next(iter(written))} ...")
    if editing := [name for name in written if hub.REGISTRY[name].edits]:
        print(f"{', '.join(editing)} with: --input_images {out / hub.INPUT_IMAGE}")
    filming = [name for name in written if hub.REGISTRY[name].films]
    if filming and not find_spec("imageio_ffmpeg"):
        print(f"{', '.join(filming)} after: pip install imageio imageio-ffmpeg, with which diffusers saves videos")
    return 0
