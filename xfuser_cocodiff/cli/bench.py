"""`cocodiff bench`: measurements of parts of the plugin."""

import argparse
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli import on_ranks
from xfuser_cocodiff.cli.answer import fail, write_json

PAPER_SHARES = "0.5,0.64,0.8,0.9,0.96"
"""The range of shares that the CoCoDiff paper reports."""


def add_parser(subparsers: Any) -> None:
    """Add the command and its subjects to the parser."""
    parser = subparsers.add_parser("bench", help="measure a part of the plugin")
    subjects = parser.add_subparsers(title="subjects", required=True, metavar="SUBJECT")
    _add_import(subjects)
    _add_a2a(subjects)
    _add_model(subjects)
    _add_kernels(subjects)
    _add_all(subjects)


def _add_all(subjects: Any) -> None:
    parser = subjects.add_parser(
        "all",
        help="the figures of the README and of docs/, made anew",
        description="Each run leaves a record; those that are there are not made again, so that what was broken off "
        "goes on. The machine should have nothing else to do, and nothing that is called an accelerator.",
        epilog="Exit status: 1 when a run failed.",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the records")
    parser.add_argument("--only", metavar="FIGURES", help="some, as speed,ring; --list says which there are (all)")
    parser.add_argument("--list", action="store_true", help="say what there is to do, and about how long it takes")
    parser.add_argument("--into", type=Path, metavar="DIR", help="put the figures into the documents of this checkout")
    parser.set_defaults(run=_all, parser=parser)


def _all(options: argparse.Namespace) -> int:
    from xfuser_cocodiff.bench import figures

    try:
        wanted = figures.chosen(options.only)
    except ValueError as error:
        return fail(str(error))
    if options.list:
        for figure in wanted:
            print(f"{figure.name} ({figure.document}): {_to_do(figures.missing([figure], options.out))}")
        print(f"in all: {_to_do(figures.missing(wanted, options.out))}")
        return 0
    failed = figures.make(wanted, options.out)
    for figure in wanted:
        if not figure.is_there(options.out):
            continue
        print(f"{figure.name}, for {figure.document}:\n\n{figure.text(options.out)}\n")
        if options.into:
            try:
                figure.put_into(options.into, options.out)
            except (OSError, ValueError) as error:
                return fail(f"--into {options.into}: {figure.document}: {error}")
    for run in failed:
        print(f"{run.name} failed; see {options.out / run.name}.log")
    return 1 if failed else 0


def _to_do(runs: list[Any]) -> str:
    minutes = sum(run.minutes for run in runs)
    return f"{len(runs)} run{'s' * (len(runs) > 1)} to do, about {minutes:.0f} minutes" if runs else "done"


def _add_import(subjects: Any) -> None:
    parser = subjects.add_parser("import", help="what the entry point adds to `import torch`")
    parser.add_argument("--repeats", type=int, default=10, help="measurements (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record here")
    parser.set_defaults(run=_import, parser=parser)


def _import(options: argparse.Namespace) -> int:
    from xfuser_cocodiff.bench import import_cost

    if options.repeats < 1:
        return fail(f"--repeats {options.repeats} is not valid; it starts at 1")
    record = import_cost.measure(options.repeats)
    low, high = (1000 * pick(record["seconds"]) for pick in (min, max))
    print(f"the entry point takes {1000 * record['median_seconds']:.2f} ms of import torch ({low:.2f} to {high:.2f})")
    if options.json:
        write_json(options, record)
    return 0


def _add_a2a(subjects: Any) -> None:
    parser = subjects.add_parser(
        "a2a",
        help="the all-to-all alone: stock's call, flat, each hierarchical form and the planner's choice",
        description="Runs on every rank, under torchrun or scripts/emulated_cluster.sh.",
    )
    on_ranks.add_arguments(parser)
    parser.add_argument("--sizes", help="bytes per rank, such as 4KB,1MB (default: 4KB to 32MB)")
    parser.add_argument("--plans", help="plans to compare, separated by semicolons (default: all forms)")
    parser.add_argument("--repeats", type=int, default=5, help="times that each is measured, in turns (%(default)s)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="what the planner goes by (default: probes)")
    parser.set_defaults(run=_a2a, parser=parser)


def _a2a(options: argparse.Namespace) -> int:
    from xfuser_cocodiff.bench import a2a

    def work(group: Any, topology: Any) -> dict[str, Any]:
        from xfuser_cocodiff.machine.plan import Plan
        from xfuser_cocodiff.xdit.launching import world
        from xfuser_cocodiff.xdit.platform.platform import compute_device

        sizes = on_ranks.sizes(options.sizes) if options.sizes else a2a.SIZES
        plans = [Plan.parse(text, topology) for text in options.plans.split(";")] if options.plans else None
        if options.repeats < 1:
            raise ValueError(f"--repeats {options.repeats} is not valid; it starts at 1")
        return a2a.measure(
            group, topology, compute_device(), world.stock_exchange(), sizes, plans, options.repeats, options.profile
        )

    return on_ranks.run(options, work, a2a.show, a2a.draw)


def _add_model(subjects: Any) -> None:
    parser = subjects.add_parser(
        "model",
        help="a FLUX transformer on links of every speed: stock against the plugin's modes",
        description="Runs on every rank of scripts/emulated_cluster.sh, whose links it slows down and speeds up until "
        "stock's all-to-alls take the asked share of a step.",
    )
    on_ranks.add_arguments(parser)
    parser.add_argument("--shape", default="high-resolution", help="or low-resolution (%(default)s)")
    parser.add_argument("--share", default=PAPER_SHARES, help="stock's all-to-all shares (%(default)s)")
    parser.add_argument(
        "--mode",
        default="exact",
        help="each MODE[/PLAN][@v_first=on|off][@head_groups=N], separated by commas (%(default)s)",
    )
    parser.add_argument("--repeats", type=int, default=5, help="steps that each is measured, in turns (%(default)s)")
    for name, what in (("width", "width"), ("depth", "layers"), ("tokens", "image tokens"), ("heads", "heads")):
        parser.add_argument(f"--{name}", type=int, help=f"{what} (default: the shape's)")
    parser.add_argument("--compile", action="store_true", help="compile the transformer, as --use_torch_compile does")
    parser.add_argument("--ring", type=int, default=1, metavar="DEGREE", help="ring across the slowest axis (none)")
    parser.set_defaults(run=_model, parser=parser)


def _model(options: argparse.Namespace) -> int:
    from xfuser_cocodiff.bench import model
    from xfuser_cocodiff.bench.transformer import Shape

    def work(group: Any, topology: Any) -> dict[str, Any]:
        sizes = {name: getattr(options, name) for name in ("width", "depth", "tokens", "heads")}
        shape = Shape.named(options.shape, topology.size, **sizes)
        shares = model.shares(options.share)
        if options.repeats < 1:
            raise ValueError(f"--repeats {options.repeats} is not valid; it starts at 1")
        return model.measure(group, topology, shape, shares, options.mode.split(","), options.repeats, options.compile)

    return on_ranks.run(options, work, model.show, model.draw)


def _add_kernels(subjects: Any) -> None:
    parser = subjects.add_parser(
        "kernels", help="what codes and moves values, against a copy on the same device, at the sizes of real models"
    )
    parser.add_argument("--degree", type=int, default=8, help="Ulysses degree, on two nodes (%(default)s)")
    parser.add_argument("--kernels", default="auto", help="auto, triton or torch (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="times that each is measured, in turns (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record here")
    parser.set_defaults(run=_kernels, parser=parser)


def _kernels(options: argparse.Namespace) -> int:
    from xfuser_cocodiff import kernels
    from xfuser_cocodiff.bench import kernels as bench
    from xfuser_cocodiff.xdit.platform.platform import compute_device

    if options.repeats < 1:
        return fail(f"--repeats {options.repeats} is not valid; it starts at 1")
    if options.degree not in bench.DEGREES:
        return fail(f"--degree {options.degree} is not valid; valid are {', '.join(map(str, bench.DEGREES))}")
    if options.kernels not in kernels.CHOICES:
        return fail(f"--kernels {options.kernels!r} is not valid; valid are {', '.join(kernels.CHOICES)}")
    kernels.use(options.kernels)
    record = bench.measure(compute_device(), options.degree, options.repeats)
    bench.show(record)
    if options.json:
        write_json(options, record)
    return 0
