"""`cocodiff plan`: what the planner chooses, and how long it expects that to take."""

import argparse
import os
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli import on_ranks
from xfuser_cocodiff.cli.output import fail, write_json


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "plan",
        help="the planner's choice for each message size, or how to split a degree for a model of real size",
        description="With --model, it needs no ranks, and goes by --profile or by a --cluster that is known on paper. "
        "Without, it goes by message sizes: with --profile it runs anywhere, else on every rank, under torchrun or "
        "scripts/emulated_cluster.sh, and probes the links first.",
    )
    on_ranks.add_arguments(parser)
    parser.add_argument("--profile", type=Path, metavar="FILE", help="a file that `cocodiff probe --json` wrote")
    parser.add_argument("--sizes", default="4KB,16KB,64KB,256KB,1MB,4MB,16MB", help="bytes per rank (%(default)s)")
    group = parser.add_argument_group("for a model of real size")
    group.add_argument("--model", help="flux1, flux2, sd35, qwen-image")
    group.add_argument("--resolution", type=int, help="pixels on a side")
    group.add_argument("--degree", type=int, help="ranks that share a sequence: Ulysses degree times Ring degree")
    group.add_argument("--cluster", help="aurora, dgx-h100, pcie, ethernet; or a --profile")
    group.add_argument("--mode", help="exact, paper, balanced, fast (default: what a run without it would take)")
    group.add_argument("--steps", type=int, default=50, help="denoising steps (%(default)s)")
    group.add_argument("--batch", type=int, default=1, help="pictures (%(default)s)")
    group.add_argument("--text-tokens", type=int, help="of the prompt (default: the pipeline's; qwen-image: 128)")
    group.add_argument("--tflops", type=float, help="what a rank reaches, for steps and speedup on a --profile")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    if options.model:
        return _for_model(options)
    lone = ("resolution", "degree", "cluster", "mode", "text_tokens", "tflops")
    if given := [name for name in lone if getattr(options, name) is not None]:
        return fail(f"--{given[0].replace('_', '-')} goes with --model")
    return _for_sizes(options)


def _for_sizes(options: argparse.Namespace) -> int:
    from xfuser_cocodiff.lab.simulation import forecast

    def predict(profile: Any) -> dict[str, Any]:
        return forecast.forecast(profile, on_ranks.parse_sizes(options.sizes))

    if options.profile is None:
        return on_ranks.run(options, lambda group, topology: predict(_probe(group, topology)), forecast.show)
    from xfuser_cocodiff.engine.topology.link_profile import Profile

    try:
        record = predict(Profile.read(options.profile))
    except ValueError as error:
        return fail(str(error))
    if os.environ.get("RANK", "0") == "0":
        forecast.show(record)
        write_json(options, record)
    return 0


def _for_model(options: argparse.Namespace) -> int:
    from xfuser_cocodiff.lab.simulation import plan_model

    if missing := [f"--{name}" for name in ("resolution", "degree") if getattr(options, name) is None]:
        return fail(f"--model needs {' and '.join(missing)}")
    names = ("model", "resolution", "degree", "topology", "profile", "cluster", "mode", "steps", "batch", "text_tokens")
    given = {name: getattr(options, name) for name in names}
    try:
        record = plan_model.record(**given, teraflops=options.tflops)
    except ValueError as error:
        return fail(str(error))
    plan_model.show(record)
    write_json(options, record)
    return 0


def _probe(group: Any, topology: Any) -> Any:
    from xfuser_cocodiff.engine.autotune import link_probe
    from xfuser_cocodiff.engine.comm.mesh import Mesh
    from xfuser_cocodiff.xdit.platforms.platform import compute_device

    return link_probe.measure(Mesh.over(group, topology, device=compute_device()), compute_device())
