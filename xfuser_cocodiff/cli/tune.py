"""`cocodiff tune`: tunes the bits per value for the layers of a model."""

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli import quality as quality_command
from xfuser_cocodiff.cli.output import fail

INTERRUPTED_STATUS = 130


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the parser."""
    parser = subparsers.add_parser(
        "tune",
        help="tune a compression schedule for your own model",
        description="Measures how much an error in each layer group, in each of Q, K, V and O and in each phase of a "
        "run lowers the image quality, in about twenty runs with virtual ranks on a single rank. Then allocates bits "
        "to meet a target with the fewest bytes. --cocodiff_schedule @FILE uses the schedule, on any topology. An "
        "interrupted command resumes when it is run again.",
    )
    parser.add_argument("--model", default="FLUX.1-dev", help="name in xDiT's registry, or a folder (%(default)s)")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="file to write the schedule and its evidence to"
    )
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument(
        "--psnr", type=float, metavar="DB", help="target: this PSNR to lossless images in dB, with the fewest bytes"
    )
    target.add_argument(
        "--bytes",
        type=float,
        metavar="FRACTION",
        help="target: this fraction of the lossless bytes of bfloat16 on slow links, with the highest PSNR",
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="file with one prompt per line; every second one is held out to check the result",
    )
    parser.add_argument("--seeds", type=int, default=4, help="number of images per run (%(default)s)")
    parser.add_argument("--steps", type=int, default=50, help="denoising steps of each run (%(default)s)")
    parser.add_argument("--size", type=int, default=128, help="height and width of the images in pixels (%(default)s)")
    parser.add_argument("--frames", type=int, default=9, help="frames of videos (%(default)s)")
    quality_command.add_virtual_ranks(parser)
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("bfloat16", "float32"),
        help="bfloat16 takes half the memory, but its rounding hides errors below about 55 dB (%(default)s)",
    )
    parser.add_argument("--sheet", type=Path, metavar="FILE", help="draw images of the held-out runs side by side")
    parser.set_defaults(run=run, parser=parser, memory_budget=None)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    from xfuser_cocodiff.lab.comparison import quality
    from xfuser_cocodiff.lab.reporting.progress import ProgressReporter
    from xfuser_cocodiff.lab.tuning import report, tune

    try:
        config, prompts = quality_command.make_config(options), _read_prompts(options)
        _check(options)
    except ValueError as error:
        return fail(str(error))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    logging.getLogger("xfuser_cocodiff").setLevel(logging.ERROR)  # else every run would log its settings
    progress = ProgressReporter(sys.stderr)
    progress.report(f"loading {options.model}")
    evaluator = quality.QualityEvaluator(
        *(options.model, config, options.seeds, options.steps, options.size),
        *(quality.DTYPES[options.dtype], progress.advance, options.frames),
    )
    prompts = prompts or evaluator.prompts
    trials = _open_cache(options, evaluator, prompts, progress)
    try:
        tuner = tune.Tuner(trials, options.model, options.steps, progress.report)
        result = tuner.tune(tune.TuningTarget(options.psnr, options.bytes))
    except ValueError as error:
        return fail(str(error))
    except KeyboardInterrupt:
        print(f"\ncocodiff: interrupted; run the same command to resume from {_cache_file(options)}", file=sys.stderr)
        return INTERRUPTED_STATUS
    finally:
        progress.close()
    record = _make_record(options, result.record(), prompts)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    report.show(record)
    if warning := report.quality_warning(record):
        print(f"cocodiff: {warning}", file=sys.stderr)
    if options.sheet:
        quality.draw_pictures({"": trials.gallery}, options.sheet)
    return 0


def _open_cache(options: argparse.Namespace, evaluator: Any, prompts: list[str], progress: Any) -> Any:
    """Open the cache of trials, and report how many of them it has."""
    from xfuser_cocodiff.lab.reporting import host
    from xfuser_cocodiff.lab.tuning import tune
    from xfuser_cocodiff.lab.tuning.trial_cache import TrialCache

    names = ("model", "seeds", "steps", "size", "frames", "virtual", "a2a", "dtype")
    key = {name: getattr(options, name) for name in names}
    key |= {"slow_axes": quality_command.make_config(options).slow_axes, "prompts": prompts}
    key |= {"versions": host.header()["host"]}
    trials = TrialCache(evaluator, _split_prompts(prompts), _cache_file(options), key, progress.report)
    runs = max(1, tune.MAX_RUNS - trials.num_cached) + tune.HELD_OUT_RUNS
    progress.set_total(runs * options.steps)
    if trials.num_cached:
        progress.report(f"resuming after {trials.num_cached} runs, cached in {_cache_file(options)}")
    return trials


def _make_record(options: argparse.Namespace, result: dict[str, Any], prompts: list[str]) -> dict[str, Any]:
    """Return the content of the schedule file, with prompts and seeds of its evidence."""
    from xfuser_cocodiff.lab.reporting import host
    from xfuser_cocodiff.lab.tuning.trial_cache import FIRST_SEEDS

    header = host.header()
    target = {"bytes": options.bytes} if options.psnr is None else {"psnr_db": options.psnr}
    record = {**header, "versions": header["host"], "command": options.command, "target": target, **result}
    for name, part, first_seed in zip(("evidence", "held_out"), _split_prompts(prompts), FIRST_SEEDS, strict=True):
        seeds = [*range(first_seed, first_seed + options.seeds)]
        record[name] = {"prompts": part, "seeds": seeds, "size": options.size, "dtype": options.dtype, **record[name]}
    return record


def _split_prompts(prompts: list[str]) -> tuple[list[str], list[str]]:
    """Return the prompts to tune on and those that are held out; a single prompt is used for both."""
    return prompts[::2], prompts[1::2] or prompts


def _cache_file(options: argparse.Namespace) -> Path:
    return Path(f"{options.out}.part")


def _read_prompts(options: argparse.Namespace) -> list[str]:
    if options.prompts is None:
        return []
    try:
        prompts = [line.strip() for line in options.prompts.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise ValueError(f"--prompts {str(options.prompts)!r} is not valid: {error.strerror}") from None
    if not prompts:
        raise ValueError(f"--prompts {str(options.prompts)!r} is not valid: the file is empty; valid is one per line")
    return prompts


def _check(options: argparse.Namespace) -> None:
    if options.seeds < 1 or options.steps < 3:
        raise ValueError(f"--seeds {options.seeds} must be at least 1, and --steps {options.steps} at least 3")
    if options.bytes is not None and not 0 < options.bytes <= 1:
        raise ValueError(f"--bytes {options.bytes:g} is not valid; valid are fractions above 0, up to 1")
    if options.psnr is not None and not 0 < options.psnr < 150:
        raise ValueError(f"--psnr {options.psnr:g} is not valid; valid are decibels above 0, below 150")
