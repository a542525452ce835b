"""`cocodiff bench`: benchmarks of the all-to-all, of denoising steps and of kernels."""

import argparse
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli import bench_cluster, bench_tables, on_ranks
from xfuser_cocodiff.cli.output import fail, write_json


def add_parser(subparsers: Any) -> None:
    """Add the command and its subcommands to the parser."""
    parser = subparsers.add_parser("bench", help="benchmark the all-to-all, denoising steps, clusters or kernels")
    subjects = parser.add_subparsers(title="subjects", required=True, metavar="SUBJECT")
    _add_a2a(subjects)
    _add_model(subjects)
    bench_cluster.add_parser(subjects)
    bench_tables.add_parser(subjects)
    _add_kernels(subjects)


def _add_a2a(subjects: Any) -> None:
    parser = subjects.add_parser(
        "a2a",
        help="the all-to-all alone: stock's call, fixed plans and the planner's choice",
        description="Runs on every rank, under torchrun or scripts/emulated_cluster.sh.",
    )
    on_ranks.add_arguments(parser)
    parser.add_argument("--sizes", help="bytes per rank, such as 4KB,1MB (default: 4KB to 32MB)")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved measurements of each (%(default)s)")
    parser.set_defaults(run=_a2a, parser=parser)


def _a2a(options: argparse.Namespace) -> int:
    from xfuser_cocodiff.lab.bench import a2a

    def work(group: Any, topology: Any) -> dict[str, Any]:
        from xfuser_cocodiff.lab.launching import bare_runtime
        from xfuser_cocodiff.xdit.platforms.platform import compute_device

        sizes = on_ranks.parse_sizes(options.sizes) if options.sizes else a2a.SIZES
        if options.repeats < 1:
            raise ValueError(f"--repeats {options.repeats} is not valid; valid are numbers from 1")
        return a2a.measure(group, topology, compute_device(), bare_runtime.stock_all_to_all(), sizes, options.repeats)

    return on_ranks.run(options, work, a2a.show)


def _add_model(subjects: Any) -> None:
    parser = subjects.add_parser(
        "model",
        help="steps of a FLUX transformer at several link rates: stock against the plugin's modes",
        description="Runs on every rank of scripts/emulated_cluster.sh and scales its link rates.",
    )
    on_ranks.add_arguments(parser)
    parser.add_argument("--shape", default="high-resolution", help="high-resolution or low-resolution (%(default)s)")
    parser.add_argument("--scale", default="1", help="factors on the link rates, such as 2,1,0.25 (%(default)s)")
    parser.add_argument(
        "--mode",
        default="exact",
        help="list of MODE[/PLAN][@v_first=on|off][@head_groups=N], separated by commas; a PLAN has semicolons for "
        "its commas, as in 'balanced/hierarchical:gpu;node=kv' (%(default)s)",
    )
    parser.add_argument("--repeats", type=int, default=5, help="interleaved steps of each variant (%(default)s)")
    parser.add_argument("--compile", action="store_true", help="compile the transformer, as --use_torch_compile does")
    parser.add_argument(
        "--ring",
        type=int,
        default=1,
        metavar="DEGREE",
        help="degree of a ring across the slowest axis (%(default)s: no ring)",
    )
    parser.set_defaults(run=_model, parser=parser)


def _model(options: argparse.Namespace) -> int:
    from xfuser_cocodiff.lab.bench import model
    from xfuser_cocodiff.lab.bench.transformer import Shape

    def work(group: Any, topology: Any) -> dict[str, Any]:
        shape = Shape.named(options.shape, topology.size)
        scales = model.parse_scales(options.scale)
        if options.repeats < 1:
            raise ValueError(f"--repeats {options.repeats} is not valid; valid are numbers from 1")
        return model.measure(group, topology, shape, scales, options.mode.split(","), options.repeats, options.compile)

    return on_ranks.run(options, work, model.show)


def _add_kernels(subjects: Any) -> None:
    parser = subjects.add_parser(
        "kernels",
        help="kernels of the codecs at the sizes of real models, relative to a copy on the same device",
        description="Times the kernels of the codecs on one device, relative to a copy and to a layer of FLUX.1-dev "
        "and Qwen-Image, and the host time of a layer's all-to-alls.",
    )
    parser.add_argument("--degree", type=int, default=8, help="Ulysses degree, on two nodes (%(default)s)")
    parser.add_argument("--kernels", default="auto", help="auto, triton or torch (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved measurements of each (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record to this file")
    parser.set_defaults(run=_kernels, parser=parser)


def _kernels(options: argparse.Namespace) -> int:
    from xfuser_cocodiff.engine.codec import kernels
    from xfuser_cocodiff.lab.bench import kernels as bench
    from xfuser_cocodiff.xdit.platforms.platform import compute_device

    if options.repeats < 1:
        return fail(f"--repeats {options.repeats} is not valid; valid are numbers from 1")
    if options.degree not in bench.DEGREES:
        return fail(f"--degree {options.degree} is not valid; valid are {', '.join(map(str, bench.DEGREES))}")
    if options.kernels not in kernels.CHOICES:
        return fail(f"--kernels {options.kernels!r} is not valid; valid are {', '.join(kernels.CHOICES)}")
    kernels.use(options.kernels)
    record = bench.measure(compute_device(), options.degree, options.repeats)
    bench.show(record)
    write_json(options, record)
    return 0
