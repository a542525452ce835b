"""`cocodiff plan`: predicts whether the plugin pays for a full-size model on a machine, and with which flags."""

import argparse
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli.output import fail, positive, write_json
from xfuser_cocodiff.engine.compression.mode_names import MODES

MACHINES = ("aurora", "dgx-h100", "pcie", "ethernet-25", "ethernet-100", "arc-b60")


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the parser."""
    parser = subparsers.add_parser(
        "plan",
        help="predict whether the plugin pays for a model on a machine, and with which flags",
        description="Predicts step time, bytes and memory of stock's fastest split into Ulysses and Ring, and of each "
        "mode in its fastest split, on a known machine or with a link profile of yours. Nothing is run.",
    )
    parser.add_argument("--model", required=True, help="such as FLUX.1-dev, FLUX.2-dev, SD3.5, Qwen-Image, Wan2.1")
    parser.add_argument("--resolution", type=int, required=True, help="pixels per side, or rows of a 16:9 video")
    machine = parser.add_mutually_exclusive_group(required=True)
    machine.add_argument("--machine", type=_dashes, choices=MACHINES, help="known machine")
    machine.add_argument("--profile", type=Path, metavar="FILE", help="what `cocodiff probe --json` wrote on all ranks")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--nodes", type=positive, help="nodes of the machine")
    size.add_argument("--ranks", type=positive, help="ranks of the machine, in place of nodes")
    parser.add_argument("--mode", type=_dashes, choices=MODES, help="list all splits of this mode (default: all modes)")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="DIR",
        help="folder of COCODIFF_RECORD in a run in mode balanced or fast, whose change per step sets the bits "
        "(default: the published change of FLUX.1-dev)",
    )
    parser.add_argument("--steps", type=positive, default=28, help="denoising steps (%(default)s)")
    parser.add_argument("--batch", type=positive, default=1, help="number of images (%(default)s)")
    parser.add_argument("--text-tokens", type=positive, help="of the prompt (default: the pipeline's; Qwen-Image: 128)")
    parser.add_argument(
        "--tflops", type=float, help="that linear layers and attention reach; needed for step times with --profile"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record to this file")
    parser.set_defaults(run=run, parser=parser)


def _dashes(text: str) -> str:
    return text.lower().replace("_", "-")


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    from xfuser_cocodiff.tools.simulation import plan

    names = ("model", "resolution", "nodes", "ranks", "machine", "profile", "mode", "steps", "batch", "text_tokens")
    try:
        if options.tflops is not None and not options.tflops > 0:
            raise ValueError(f"--tflops {options.tflops:g} is not valid; it must be greater than 0")
        given = {name: getattr(options, name) for name in names}
        record = plan.record(**given, teraflops=options.tflops, recorded=options.record)
    except ValueError as error:
        return fail(str(error))
    plan.show(record)
    write_json(options, record)
    return 0
