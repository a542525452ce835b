"""`cocodiff bench`: measurements of parts of the plugin."""

import argparse
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli import on_ranks
from xfuser_cocodiff.cli.output import fail, write_json


def add_parser(subparsers: Any) -> None:
    """Add the command and its subjects to the parser."""
    parser = subparsers.add_parser("bench", help="measure a part of the plugin")
    subjects = parser.add_subparsers(title="subjects", required=True, metavar="SUBJECT")
    _add_a2a(subjects)
    _add_model(subjects)
    _add_kernels(subjects)
    _add_all(subjects)


def _add_all(subjects: Any) -> None:
    parser = subjects.add_parser(
        "all",
        help="the commands behind the figures of README and docs/",
        description="Each run leaves a record and its table in a folder; those that are there are not made again, so "
        "that what was broken off goes on. The machine should have nothing else to do.",
        epilog="Exit status: 1 when a run failed.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="DIR", help="folder of the records")
    what.add_argument("--list", action="store_true", help="list the runs")
    parser.add_argument("--only", metavar="NAMES", help="some runs, as speed,kernels (all)")
    parser.set_defaults(run=_all, parser=parser)


def _all(options: argparse.Namespace) -> int:
    from xfuser_cocodiff.lab.bench import suite

    try:
        runs = suite.chosen(options.only)
    except ValueError as error:
        return fail(str(error))
    if options.list:
        for run in runs:
            print(f"{run.name}: cocodiff {run.command}" + f", on a cluster: {run.cluster}" * bool(run.cluster))
        return 0
    failed = suite.make(runs, options.out)
    for run in failed:
        print(f"{run.name} failed; see {options.out / run.name}.log")
    return 1 if failed else 0


def _add_a2a(subjects: Any) -> None:
    parser = subjects.add_parser(
        "a2a",
        help="the all-to-all alone: stock's call, flat, each hierarchical form and the planner's choice",
        description="Runs on every rank, under torchrun or scripts/emulated_cluster.sh.",
    )
    on_ranks.add_arguments(parser)
    parser.add_argument("--sizes", help="bytes per rank, such as 4KB,1MB (default: 4KB to 32MB)")
    parser.add_argument("--repeats", type=int, default=5, help="times that each is measured, in turns (%(default)s)")
    parser.set_defaults(run=_a2a, parser=parser)


def _a2a(options: argparse.Namespace) -> int:
    from xfuser_cocodiff.lab.bench import a2a

    def work(group: Any, topology: Any) -> dict[str, Any]:
        from xfuser_cocodiff.xdit.launching import bare_runtime
        from xfuser_cocodiff.xdit.platforms.platform import compute_device

        sizes = on_ranks.parse_sizes(options.sizes) if options.sizes else a2a.SIZES
        if options.repeats < 1:
            raise ValueError(f"--repeats {options.repeats} is not valid; it starts at 1")
        return a2a.measure(group, topology, compute_device(), bare_runtime.stock_all_to_all(), sizes, options.repeats)

    return on_ranks.run(options, work, a2a.show)


def _add_model(subjects: Any) -> None:
    parser = subjects.add_parser(
        "model",
        help="a FLUX transformer on links of several speeds: stock against the plugin's modes",
        description="Runs on every rank of scripts/emulated_cluster.sh, whose links it slows down and speeds up.",
    )
    on_ranks.add_arguments(parser)
    parser.add_argument("--shape", default="high-resolution", help="or low-resolution (%(default)s)")
    parser.add_argument("--scale", default="1", help="of the rates of the links, such as 2,1,0.25 (%(default)s)")
    parser.add_argument(
        "--mode",
        default="exact",
        help="each MODE[/PLAN][@v_first=on|off][@head_groups=N], separated by commas (%(default)s)",
    )
    parser.add_argument("--repeats", type=int, default=5, help="steps that each is measured, in turns (%(default)s)")
    parser.add_argument("--compile", action="store_true", help="compile the transformer, as --use_torch_compile does")
    parser.add_argument("--ring", type=int, default=1, metavar="DEGREE", help="ring across the slowest axis (none)")
    parser.set_defaults(run=_model, parser=parser)


def _model(options: argparse.Namespace) -> int:
    from xfuser_cocodiff.lab.bench import model
    from xfuser_cocodiff.lab.bench.transformer import Shape

    def work(group: Any, topology: Any) -> dict[str, Any]:
        shape = Shape.named(options.shape, topology.size)
        scales = model.scales(options.scale)
        if options.repeats < 1:
            raise ValueError(f"--repeats {options.repeats} is not valid; it starts at 1")
        return model.measure(group, topology, shape, scales, options.mode.split(","), options.repeats, options.compile)

    return on_ranks.run(options, work, model.show)


def _add_kernels(subjects: Any) -> None:
    parser = subjects.add_parser(
        "kernels", help="what codes values, against a copy on the same device, at the sizes of real models"
    )
    parser.add_argument("--degree", type=int, default=8, help="Ulysses degree, on two nodes (%(default)s)")
    parser.add_argument("--kernels", default="auto", help="auto, triton, numba or torch (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="times that each is measured, in turns (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record here")
    parser.set_defaults(run=_kernels, parser=parser)


def _kernels(options: argparse.Namespace) -> int:
    from xfuser_cocodiff.engine import kernels
    from xfuser_cocodiff.lab.bench import kernels as bench
    from xfuser_cocodiff.xdit.platforms.platform import compute_device

    if options.repeats < 1:
        return fail(f"--repeats {options.repeats} is not valid; it starts at 1")
    if options.degree not in bench.DEGREES:
        return fail(f"--degree {options.degree} is not valid; valid are {', '.join(map(str, bench.DEGREES))}")
    if options.kernels not in kernels.CHOICES:
        return fail(f"--kernels {options.kernels!r} is not valid; valid are {', '.join(kernels.CHOICES)}")
    kernels.use(options.kernels)
    record = bench.measure(compute_device(), options.degree, options.repeats)
    bench.show(record)
    write_json(options, record)
    return 0
