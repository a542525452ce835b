"""`cocodiff quality`: what modes and codecs cost in quality."""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli.output import fail, write_json


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "quality",
        help="bytes on slow links against fidelity, for modes and codecs",
        description="Generates and inpaints with virtual ranks on one real one, and compares with exact runs at equal "
        "seeds. The model is loaded as the xdit command does it; HF_HOME says from where.",
    )
    parser.add_argument("--model", default="FLUX.1-dev", help="in xDiT's registry (%(default)s)")
    add_ranks(parser)
    parser.add_argument(
        "--mode", default="balanced,fast,paper", metavar="MODES", help="each MODE or MODE@CHANGES (%(default)s)"
    )
    parser.add_argument("--sweep", action="store_true", help="evaluator many codecs besides")
    parser.add_argument("--seeds", type=int, default=16, help="pictures of each (%(default)s)")
    parser.add_argument("--steps", type=int, default=50, help="of each run (%(default)s)")
    parser.add_argument("--size", type=int, default=128, help="of the pictures in pixels (%(default)s)")
    parser.add_argument("--frames", type=int, default=9, help="of videos (%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"), help="(%(default)s)")
    parser.add_argument("--memory_budget", type=float, metavar="GIB", help="of references on each rank (no bound)")
    parser.add_argument("--no_inpainting", action="store_true", help="generate only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the record here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw bytes against fidelity here")
    parser.add_argument("--sheet", type=Path, metavar="FILE", help="put pictures of all modes side by side here")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    from xfuser_cocodiff.lab.comparison import inpainting, quality
    from xfuser_cocodiff.lab.reporting.progress import ProgressReporter

    try:
        config, cases = config_of(options), quality.parse_cases(options.mode.split(","), options.sweep)
        if min(options.seeds, options.steps) < 1:
            raise ValueError(f"--seeds {options.seeds} and --steps {options.steps} must be at least 1")
    except ValueError as error:
        return fail(str(error))
    dtype = quality.DTYPES[options.dtype]
    progress = ProgressReporter(sys.stderr)
    progress.report(f"loading {options.model}")
    evaluator = quality.QualityEvaluator(
        *(options.model, config, options.seeds, options.steps, options.size, dtype, progress.advance),
        frames=options.frames,
    )
    masks = inpainting.MASKS if evaluator.inpaints and not options.no_inpainting else ()
    progress.set_total((1 + len(cases)) * (1 + len(masks)) * options.steps)
    record, gallery = quality.measure(evaluator, cases, masks, progress.report)
    progress.close()
    quality.show(record)
    write_json(options, record)
    if options.plot:
        quality.draw(record, options.plot)
    if options.sheet:
        quality.draw_pictures(gallery, options.sheet)
    return 0


def add_ranks(parser: argparse.ArgumentParser) -> None:
    """Options of :func:`config_of` that say which ranks one stands for."""
    parser.add_argument(
        "--virtual",
        default="2x2",
        metavar="TOPOLOGY",
        help="of the virtual ranks; ring:2x2 has a ring of them (%(default)s)",
    )
    parser.add_argument("--slow_axes", metavar="AXES", help="their slow ones, as node,gpu (all but the innermost)")


def config_of(options: argparse.Namespace) -> Any:
    """What is the same for all codecs."""
    from xfuser_cocodiff.engine.compression.reference_memory import GIB
    from xfuser_cocodiff.engine.settings.config import CocoDiffConfig, parse_virtual_ranks
    from xfuser_cocodiff.engine.topology.topology import Topology

    virtual, is_ring = parse_virtual_ranks(options.virtual)
    axes = [axis.name for axis in virtual.axes if axis.size > 1]
    slow_axes = tuple(options.slow_axes.split(",")) if options.slow_axes else tuple(axes[:-1] or axes)
    if not slow_axes or not set(slow_axes) <= set(axes):
        raise ValueError(f"--slow_axes {options.slow_axes!r} is not valid; --virtual {virtual} has {', '.join(axes)}")
    budget = options.memory_budget
    if budget is not None and not 0 < budget < math.inf:
        raise ValueError(f"--memory_budget {budget} is not valid; valid are GiB above 0")
    return CocoDiffConfig(
        topology=Topology.flat(1),
        virtual=virtual,
        virtual_ring=is_ring,
        slow_axes=slow_axes,
        memory_budget=None if budget is None else int(budget * GIB),
    )
