"""`cocodiff plan`: chooses plans for message sizes, or a split of a degree for a full-size model."""

import argparse
import os
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli import on_ranks
from xfuser_cocodiff.cli.output import fail, write_json


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the parser."""
    parser = subparsers.add_parser(
        "plan",
        help="choose plans for message sizes, or a split of a degree for a full-size model",
        description="With --model, predicts step times of all splits of a degree into Ulysses and Ring, on a --cluster "
        "or with a --profile, and needs no ranks. Without --model, chooses an all-to-all plan for each of --sizes: "
        "from a --profile, or else on all ranks, under torchrun or scripts/emulated_cluster.sh, by probing the links "
        "first.",
    )
    on_ranks.add_arguments(parser)
    parser.add_argument("--profile", type=Path, metavar="FILE", help="link profile that `cocodiff probe --json` wrote")
    parser.add_argument("--sizes", default="4KB,16KB,64KB,256KB,1MB,4MB,16MB", help="bytes per rank (%(default)s)")
    group = parser.add_argument_group("full-size models")
    group.add_argument("--model", help="flux1, flux2, sd35, qwen-image, hunyuan or wan")
    group.add_argument("--resolution", type=int, help="pixels per side of an image, or rows of a 16:9 video")
    group.add_argument(
        "--degree", type=int, help="number of ranks that share a sequence: Ulysses degree times ring degree"
    )
    group.add_argument(
        "--cluster",
        help="known cluster, instead of --profile: aurora, dgx-h100, pcie, ethernet-25, ethernet-100, arc-b60",
    )
    group.add_argument("--mode", help="exact, paper, balanced or fast (default: as in a run without --cocodiff_mode)")
    group.add_argument(
        "--record",
        type=Path,
        metavar="DIR",
        help="folder of COCODIFF_RECORD in a run in mode balanced or fast, whose change per step sets the bits "
        "(default: the published change of FLUX.1-dev)",
    )
    group.add_argument("--steps", type=int, default=28, help="denoising steps (%(default)s)")
    group.add_argument("--batch", type=int, default=1, help="number of images (%(default)s)")
    group.add_argument(
        "--text-tokens", type=int, help="text tokens of the prompt (default: the pipeline's; qwen-image: 128)"
    )
    group.add_argument(
        "--memory", type=float, metavar="GIB", help="GiB of a device (default: of the cluster's devices, if known)"
    )
    group.add_argument(
        "--tflops",
        type=float,
        help="TFLOP/s that linear layers and attention reach; required for step times with --profile",
    )
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    if options.model:
        return _for_model(options)
    model_options = ("resolution", "degree", "cluster", "mode", "record", "text_tokens", "memory", "tflops")
    if given := [name for name in model_options if getattr(options, name) is not None]:
        return fail(f"--{given[0].replace('_', '-')} requires --model")
    return _for_sizes(options)


def _for_sizes(options: argparse.Namespace) -> int:
    from xfuser_cocodiff.lab.simulation import forecast

    try:
        sizes = on_ranks.parse_sizes(options.sizes)  # before any rank probes its links
    except ValueError as error:
        return fail(str(error))
    if options.profile is None:
        return on_ranks.run(
            options, lambda group, topology: forecast.forecast(_probe(group, topology), sizes), forecast.show
        )
    from xfuser_cocodiff.engine.topology.link_profile import Profile

    try:
        record = forecast.forecast(Profile.read(options.profile), sizes)
    except ValueError as error:
        return fail(str(error))
    if os.environ.get("RANK", "0") == "0":
        forecast.show(record)
        write_json(options, record)
    return 0


def _for_model(options: argparse.Namespace) -> int:
    from xfuser_cocodiff.lab.simulation import plan_model

    if missing := [f"--{name}" for name in ("resolution", "degree") if getattr(options, name) is None]:
        return fail(f"--model requires {' and '.join(missing)}")
    names = ("model", "resolution", "degree", "topology", "profile", "cluster", "mode", "steps", "batch", "text_tokens")
    given = {name: getattr(options, name) for name in (*names, "memory")}
    try:
        record = plan_model.record(**given, teraflops=options.tflops, recorded=options.record)
    except ValueError as error:
        return fail(str(error))
    plan_model.show(record)
    write_json(options, record)
    return 0


def _probe(group: Any, topology: Any) -> Any:
    from xfuser_cocodiff.engine.comm.mesh import Mesh
    from xfuser_cocodiff.lab.probing import machine_profile
    from xfuser_cocodiff.xdit.platforms.platform import compute_device

    return machine_profile.measure(Mesh.over(group, topology, device=compute_device()), compute_device())
