"""`cocodiff tune`: bits for the layers of a model, by what errors in them do to its pictures."""

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli import quality as quality_command
from xfuser_cocodiff.cli.output import fail

INTERRUPTED = 130


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "tune",
        help="a schedule for a model of one's own",
        description="Measures in some twenty runs, with virtual ranks on one real one, how much an error in each group "
        "of layers, in each of Q, K, V and O and in each phase of a run shows in the pictures, and allots bits so that "
        "a target is met with the fewest bytes. --cocodiff_schedule @FILE uses what it writes, on any topology. "
        "Broken off, the same command goes on where it was.",
    )
    parser.add_argument("--model", default="FLUX.1-dev", help="in xDiT's registry, or a folder (%(default)s)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the schedule, with its evidence")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--psnr", type=float, metavar="DB", help="to the exact pictures, with the fewest bytes")
    target.add_argument(
        "--bytes", type=float, metavar="SHARE", help="of the exact bytes in bfloat16, with the highest PSNR"
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="one a line; every other one is for the check")
    parser.add_argument("--seeds", type=int, default=4, help="pictures of a run (%(default)s)")
    parser.add_argument("--steps", type=int, default=50, help="of each run (%(default)s)")
    parser.add_argument("--size", type=int, default=128, help="of the pictures in pixels (%(default)s)")
    parser.add_argument("--frames", type=int, default=9, help="of videos (%(default)s)")
    quality_command.add_ranks(parser)
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("bfloat16", "float32"),
        help="bfloat16 takes half the memory, and its rounding hides errors below some 55 dB (%(default)s)",
    )
    parser.add_argument("--sheet", type=Path, metavar="FILE", help="put pictures of the check side by side here")
    parser.set_defaults(run=run, parser=parser, memory_budget=None)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    from xfuser_cocodiff.lab.comparison import quality
    from xfuser_cocodiff.lab.reporting import host
    from xfuser_cocodiff.lab.reporting.progress import ProgressReporter
    from xfuser_cocodiff.lab.tuning import report, tune
    from xfuser_cocodiff.lab.tuning.trial_cache import FIRST_SEEDS, Trials

    try:
        config, prompts = quality_command.config_of(options), _prompts(options)
        _check(options)
    except ValueError as error:
        return fail(str(error))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    progress = ProgressReporter(sys.stderr)
    progress.report(f"loading {options.model}")
    logging.getLogger("xfuser_cocodiff").setLevel(logging.ERROR)  # what it would say of each run
    judge = quality.QualityEvaluator(
        *(options.model, config, options.seeds, options.steps, options.size),
        *(quality.DTYPES[options.dtype], progress.advance, options.frames),
    )
    prompts = prompts or judge.prompts
    both = prompts[::2], prompts[1::2] or prompts
    of = {name: getattr(options, name) for name in ("model", "seeds", "steps", "size", "frames", "virtual", "dtype")}
    of |= {"slow_axes": config.slow_axes, "prompts": prompts, "versions": host.header()["host"]}
    trials = Trials(judge, both, _part(options), of, progress.report)
    runs = max(1, tune.RUNS - trials.done) + tune.CHECKS
    progress.set_total(runs * options.steps)
    if trials.done:
        progress.report(f"going on after {trials.done} runs, which {_part(options)} remembers")
    try:
        tuner = tune.Tuner(trials, options.model, options.steps, progress.report)
        tuned = tuner.tune(tune.Target(options.psnr, options.bytes))
    except ValueError as error:
        return fail(str(error))
    except KeyboardInterrupt:
        print(f"\ncocodiff: stopped; the same command goes on, since {_part(options)} remembers", file=sys.stderr)
        return INTERRUPTED
    finally:
        progress.close()
    record = {**_header(options), **tuned.record()}
    for name, these, first_seed in zip(("evidence", "held_out"), both, FIRST_SEEDS, strict=True):
        seeds = [*range(first_seed, first_seed + options.seeds)]
        record[name] = {"prompts": these, "seeds": seeds, "size": options.size, "dtype": options.dtype, **record[name]}
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    report.show(record)
    if caution := report.caution(record):
        print(f"cocodiff: {caution}", file=sys.stderr)
    if options.sheet:
        quality.draw_pictures({"": trials.gallery}, options.sheet)
    return 0


def _header(options: argparse.Namespace) -> dict[str, Any]:
    from xfuser_cocodiff.lab.reporting import host

    header = host.header()
    target = {"bytes": options.bytes} if options.psnr is None else {"psnr_db": options.psnr}
    return {**header, "versions": header["host"], "command": options.command, "target": target}


def _part(options: argparse.Namespace) -> Path:
    """Where runs are remembered."""
    return Path(f"{options.out}.part")


def _prompts(options: argparse.Namespace) -> list[str]:
    if options.prompts is None:
        return []
    try:
        found = [line.strip() for line in options.prompts.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise ValueError(f"--prompts {str(options.prompts)!r} is not valid: {error.strerror}") from None
    if not found:
        raise ValueError(f"--prompts {str(options.prompts)!r} is not valid: it has none; valid is one a line")
    return found


def _check(options: argparse.Namespace) -> None:
    if options.seeds < 1 or options.steps < 3:
        raise ValueError(f"--seeds {options.seeds} must be at least 1, and --steps {options.steps} at least 3")
    if options.bytes is not None and not 0 < options.bytes <= 1:
        raise ValueError(f"--bytes {options.bytes:g} is not valid; valid are shares above 0, up to 1")
    if options.psnr is not None and not 0 < options.psnr < 150:
        raise ValueError(f"--psnr {options.psnr:g} is not valid; valid are decibels from 0 to 150")
