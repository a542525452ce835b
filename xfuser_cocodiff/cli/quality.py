"""`cocodiff quality`: measures errors, bytes and image quality of modes on one rank."""

import argparse
import sys
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli.output import fail, positive, silence_libraries, write_json

VIRTUAL = "2x2"
_FIELDS = ("cocodiff_slow_axes", "cocodiff_a2a", "cocodiff_memory_budget")
"""Options of the plugin that runs on virtual ranks share."""
_COLLECTIVES = {"heads": "all-to-all", "kv": "gathered K and V", "ring": "ring"}
"""Texts of the collectives along slow axes."""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the parser."""
    parser = subparsers.add_parser(
        "quality",
        help="what does a lossy mode do to my model?",
        description="Generates images on one device with the codecs of many ranks, and compares them with lossless "
        "images at the same seeds. The model is loaded as by the xdit command.",
    )
    parser.add_argument("--model", default="FLUX.1-dev", help="name in xDiT's registry (%(default)s)")
    parser.add_argument(
        "--modes",
        default="balanced,fast,paper",
        metavar="MODES",
        help="modes, also with settings, such as balanced@bits=2;predictor=0 (%(default)s)",
    )
    parser.add_argument("--mode", dest="modes", help=argparse.SUPPRESS)  # the former name of --modes
    parser.add_argument("--prompt", nargs="+", help="prompts (default: some that small models know)")
    parser.add_argument("--seeds", type=positive, default=16, help="number of images per mode (%(default)s)")
    parser.add_argument("--steps", type=positive, default=50, help="denoising steps of each run (%(default)s)")
    parser.add_argument("--guidance_scale", type=float, metavar="SCALE", help="default: that of the pipeline")
    parser.add_argument("--resolution", type=positive, default=128, help="pixels per side (%(default)s)")
    parser.add_argument("--size", dest="resolution", type=positive, help=argparse.SUPPRESS)  # the former name
    parser.add_argument("--frames", type=positive, default=9, help="frames of videos (%(default)s)")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float32"),
        help="dtype of weights and activations (%(default)s)",
    )
    parser.add_argument(
        "--cocodiff_virtual",
        default=VIRTUAL,
        metavar="TOPOLOGY",
        help="topology of the virtual ranks; ring:2x2 is a ring (%(default)s)",
    )
    for field in _FIELDS:
        parser.add_argument(f"--{field}", metavar=field.rpartition("_")[2].upper(), help="as in a run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record to this file")
    parser.add_argument("--sheet", type=Path, metavar="FILE", help="draw images of all modes side by side")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    silence_libraries()
    import torch

    from xfuser_cocodiff.tools.comparison import quality

    try:
        config = make_config(options)
        cases = quality.parse_cases(options.modes.split(","))
        evaluator = quality.QualityEvaluator(
            *(options.model, config, options.seeds, options.steps, options.resolution, getattr(torch, options.dtype)),
            *(options.frames, options.guidance_scale, options.prompt or quality.PROMPTS),
        )
    except ValueError as error:
        return fail(str(error))
    record, gallery = quality.measure(evaluator, cases, lambda case: print(case, file=sys.stderr, flush=True))
    show(record)
    write_json(options, record)
    if options.sheet:
        quality.draw_images(gallery, options.sheet)
    return 0


def make_config(options: argparse.Namespace) -> Any:
    """Return the configuration that all runs share, as a run with these options of the plugin would have it.

    Raises:
        ValueError: an option is not valid.
    """
    from xfuser_cocodiff.engine.topology.topology import Topology
    from xfuser_cocodiff.xdit.settings.resolve import resolve
    from xfuser_cocodiff.xdit.settings.ring_placement import SequenceRanks

    given = {field: getattr(options, field) for field in ("cocodiff_virtual", *_FIELDS)}
    values = {"use_cocodiff": True, **given}
    return resolve(values, {}, SequenceRanks(1, Topology.flat(1)))


def show(record: dict[str, Any]) -> None:
    """Print a table with one row per case."""
    from xfuser_cocodiff.cli import tables

    texts, console = ("mode", "changes", "collectives"), tables.console()
    columns = (*texts, "error", "by tensor", "bits", "bytes", "PSNR dB", "sd", "SSIM", "LPIPS")
    table = tables.table(columns, texts)
    for row in record["rows"]:
        table.add_row(
            row["mode"],
            row["codec"],
            ", ".join(_COLLECTIVES[each] for each in row["exchanges"]) or "not coded",
            _format(row["mean_error"], ".2%"),
            " ".join(f"{name.upper()} {error:.1%}" for name, error in sorted(row["error"].items())),
            f"{row['bits']:.2f}",
            f"{row['bytes_slow_fraction']:.3f}",
            "equal" if row["bit_equal"] else _format(row["psnr_db_mean"], ".1f"),
            _format(row["psnr_db_sd"], ".1f"),
            f"{row['ssim_mean']:.4f}",
            _format(row["lpips_mean"], ".4f"),
        )
    console.print(table)
    console.print("error: norm of decoded minus sent values over that of the sent ones, mean over tensors and steps")
    if yardsticks := next((row["yardsticks"] for row in record["rows"] if row["yardsticks"]), None):
        console.print("on the same tensors: " + ", ".join(f"{name.upper()} {e:.2%}" for name, e in yardsticks.items()))
    console.print("bits: per value that crosses slow links; bytes: over lossless ones of the same collectives")
    console.print("PSNR, SSIM, LPIPS: to lossless runs, mean over seeds")


def _format(value: float | None, digits: str) -> str:
    return "-" if value is None else format(value, digits)
