"""`cocodiff quality`: measures the image quality of modes and codecs."""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli.output import fail, write_json


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the parser."""
    parser = subparsers.add_parser(
        "quality",
        help="measure bytes on slow links against image quality, by mode and codec",
        description="Generates and inpaints images with virtual ranks on a single rank, and compares them with "
        "lossless runs at the same seeds. The model is loaded as by the xdit command, from HF_HOME.",
    )
    parser.add_argument("--model", default="FLUX.1-dev", help="name in xDiT's registry (%(default)s)")
    add_virtual_ranks(parser)
    parser.add_argument(
        "--mode",
        default="balanced,fast,paper",
        metavar="MODES",
        help="each MODE or MODE@SCHEDULE, such as balanced@bits=2;predictor=0 (%(default)s)",
    )
    parser.add_argument(
        "--methods", action="store_true", help="also measure the codes of other systems, and modes by heads"
    )
    parser.add_argument("--seeds", type=int, default=16, help="number of images per mode (%(default)s)")
    parser.add_argument("--steps", type=int, default=50, help="denoising steps of each run (%(default)s)")
    parser.add_argument(
        "--guidance_scale", type=float, metavar="SCALE", help="guidance scale of the pipeline (default: its own)"
    )
    parser.add_argument("--size", type=int, default=128, help="height and width of the images in pixels (%(default)s)")
    parser.add_argument("--frames", type=int, default=9, help="frames of videos (%(default)s)")
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=("bfloat16", "float32"),
        help="dtype of weights and activations (%(default)s)",
    )
    parser.add_argument(
        "--memory_budget", type=float, metavar="GIB", help="GiB of link references on each rank (default: as in a run)"
    )
    parser.add_argument("--no_inpainting", action="store_true", help="generate images only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record to this file")
    parser.add_argument("--sheet", type=Path, metavar="FILE", help="draw images of all modes side by side")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    from xfuser_cocodiff.lab.comparison import inpainting, quality
    from xfuser_cocodiff.lab.reporting.progress import ProgressReporter

    try:
        config = make_config(options)
        cases = quality.parse_cases(options.mode.split(","), options.methods)
        if min(options.seeds, options.steps) < 1:
            raise ValueError(f"--seeds {options.seeds} and --steps {options.steps} must be at least 1")
    except ValueError as error:
        return fail(str(error))
    progress = ProgressReporter(sys.stderr)
    progress.report(f"loading {options.model}")
    try:
        evaluator = quality.QualityEvaluator(
            *(options.model, config, options.seeds, options.steps, options.size),
            *(quality.DTYPES[options.dtype], progress.advance, options.frames, options.guidance_scale),
        )
    except ValueError as error:
        return fail(str(error))
    masks = inpainting.MASKS if evaluator.inpaints and not options.no_inpainting else ()
    progress.set_total((1 + len(cases)) * (1 + len(masks)) * options.steps)
    record, gallery = quality.measure(evaluator, cases, masks, progress.report)
    progress.close()
    quality.show(record)
    write_json(options, record)
    if options.sheet:
        quality.draw_pictures(gallery, options.sheet)
    return 0


def add_virtual_ranks(parser: argparse.ArgumentParser) -> None:
    """Add the options for virtual ranks, which :func:`make_config` reads."""
    parser.add_argument(
        "--virtual",
        default="2x2",
        metavar="TOPOLOGY",
        help="topology of the virtual ranks; ring:2x2 is a ring of them (%(default)s)",
    )
    parser.add_argument(
        "--a2a",
        default="auto",
        metavar="PLAN",
        help="exchange along slow axes: hierarchical sends Q, K, V and O by heads, hierarchical:gpu,node=kv gathers K "
        "and V, and auto does what lossy modes do by default (%(default)s)",
    )
    parser.add_argument(
        "--slow_axes", metavar="AXES", help="slow axes of the virtual ranks, such as node,gpu (all but the innermost)"
    )


def make_config(options: argparse.Namespace) -> Any:
    """Return the configuration that all runs share.

    Raises:
        ValueError: an option is not valid.
    """
    from xfuser_cocodiff.engine.compression.reference_memory import GIB
    from xfuser_cocodiff.engine.topology.topology import Topology
    from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig
    from xfuser_cocodiff.xdit.settings.parsers import virtual as parse_virtual

    virtual, is_ring = parse_virtual(options.virtual)
    axes = virtual.moving_axes
    named = options.slow_axes.split(",") if options.slow_axes else axes[:-1] or axes
    if not named or not set(named) <= set(axes):
        raise ValueError(f"--slow_axes {options.slow_axes!r} is not valid; --virtual {virtual} has {', '.join(axes)}")
    slow_axes = tuple(name for name in axes if name in named)
    if slow_axes != axes[: len(slow_axes)]:
        raise ValueError(f"--slow_axes {options.slow_axes!r} is not valid: they must be the outermost of {virtual}")
    budget = options.memory_budget
    if budget is not None and not 0 < budget < math.inf:
        raise ValueError(f"--memory_budget {budget} is not valid; valid are GiB above 0")
    return CocoDiffConfig(
        topology=Topology.flat(1),
        plan=_parse_plan(options, virtual, is_ring, slow_axes),
        virtual=virtual,
        virtual_ring=is_ring,
        slow_axes=slow_axes,
        memory_budget=None if budget is None else int(budget * GIB),
    )


def _parse_plan(options: argparse.Namespace, virtual: Any, is_ring: bool, slow_axes: tuple[str, ...]) -> Any:
    """Return the plan of `--a2a`, which selects the exchange; None for the default of the modes."""
    from xfuser_cocodiff.engine.topology.plans import GATHER, HIERARCHICAL, Plan
    from xfuser_cocodiff.xdit.settings.config import AUTO

    if options.a2a == AUTO:
        return None
    invalid = f"--a2a {options.a2a!r} is not valid"
    if is_ring:
        raise ValueError(f"{invalid} with --virtual {options.virtual}, a ring of K and V; valid is {AUTO!r}")
    try:
        plan = Plan.parse(options.a2a, virtual)
    except ValueError as error:
        raise ValueError(f"--a2a {error}, or {AUTO!r}") from None
    if plan.gathers_kv and plan.gathered_axes != slow_axes:
        raise ValueError(
            f"{invalid}: it gathers K and V along {', '.join(plan.gathered_axes)}; valid with {GATHER} are the slow "
            f"axes {', '.join(slow_axes)} (--slow_axes), {HIERARCHICAL!r} and {AUTO!r}"
        )
    return plan
