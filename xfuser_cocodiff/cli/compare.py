"""`cocodiff compare`: runs a command with stock xDiT and with the plugin, and writes a report."""

import argparse
import sys
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli.output import fail
from xfuser_cocodiff.lab.emulation.presets import PRESETS

INTERRUPTED_STATUS = 130


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the parser."""
    parser = subparsers.add_parser(
        "compare",
        help="compare the plugin with stock xDiT: step time, communication, quality",
        description="Runs a command with stock xDiT (the baseline) and with the plugin, with the same seed, and writes "
        "a report with speedup, communication and quality.",
        usage="%(prog)s [--out DIR] [--repeats N] [--modes MODES] [--launcher COMMAND | --emulate PRESET "
        "[--topology T] [--scale S]] [--stock DIR] [--trace] [--json FILE] "
        "-- <xdit arguments | script and arguments>",
        epilog="Exit status: 0 on success; 1 if a result without lossy compression is not bit-identical to stock's; "
        "2 if the comparison failed.",
    )
    parser.add_argument("--out", type=Path, default=Path("cocodiff-report"), help="folder of the report (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="measured runs of each variant (%(default)s)")
    parser.add_argument(
        "--modes",
        help="modes of the plugin to compare, such as exact,balanced,fast (default: the mode that the arguments or the "
        "environment select)",
    )
    parser.add_argument(
        "--launcher",
        metavar="COMMAND",
        help="command that starts the ranks instead of torchrun, such as 'mpiexec -n {ranks} --ppn 12 rank.sh'; it "
        "must set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, and all ranks need access to the --out "
        "folder",
    )
    _add_emulation(parser)
    parser.add_argument(
        "--stock",
        type=Path,
        metavar="DIR",
        help="reuse the baseline of an earlier comparison (its --out folder) if its runs of stock are complete",
    )
    parser.add_argument(
        "--trace", action="store_true", help="run each variant once more and trace its last steps with torch.profiler"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record to this file")
    parser.set_defaults(run=run, parser=parser)


def _add_emulation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--emulate",
        metavar="PRESET",
        help=f"run the ranks on an emulated cluster with the links of {', '.join(PRESETS)}: on the CPU, each rank in a "
        "network namespace of its own",
    )
    parser.add_argument(
        "--topology",
        help="topology of all emulated ranks, such as node=2,gpu=2 (default: --cocodiff_topology, else the preset's, "
        "else two nodes)",
    )
    parser.add_argument(
        "--scale", help="factor for the bandwidths of the preset, which are 1/10000 of the real ones (default: 1)"
    )


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    from rich.console import Console

    from xfuser_cocodiff.lab.comparison import compare, launch, record, report
    from xfuser_cocodiff.lab.reporting import formatting

    if options.json:  # so that a folder that cannot be created is an error before minutes of runs
        options.json.parent.mkdir(parents=True, exist_ok=True)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    if missing := report.missing_libraries():
        return fail(f"the report needs {', '.join(missing)}: {formatting.INSTALL_REPORT_EXTRA}")
    try:
        comparison = compare.compare(options.xdit_arguments, options.out, console, _compare_options(options))
    except (compare.UsageError, launch.LaunchError, record.RecordError) as error:
        return fail(str(error))
    except KeyboardInterrupt:
        print("cocodiff: interrupted", file=sys.stderr)
        return INTERRUPTED_STATUS
    comparison["command"] = options.command
    page = report.write(comparison, options.out)
    if options.json:
        options.json.write_text((options.out / "report.json").read_text())
    _print_result(comparison, options.out, console)
    console.print(f"\nReport: {page}")
    return 0 if report.passed(comparison) else 1


def _compare_options(options: argparse.Namespace) -> Any:
    """Convert the options of the command line.

    Raises:
        UsageError: an option needs another one that is missing.
    """
    from xfuser_cocodiff.lab.comparison.compare import CompareOptions, UsageError
    from xfuser_cocodiff.lab.comparison.emulate import EmulationOptions

    given = {name: value for name in ("topology", "scale") if (value := getattr(options, name)) is not None}
    if given and options.emulate is None:
        name, value = next(iter(given.items()))
        raise UsageError(f"--{name} {value} needs --emulate: it configures the emulated cluster")
    return CompareOptions(
        repeats=options.repeats,
        modes=tuple(options.modes.split(",")) if options.modes else (),
        traced=options.trace,
        launcher=options.launcher,
        emulation=EmulationOptions(options.emulate, **given) if options.emulate else None,
        baseline=options.stock,
    )


def _print_result(comparison: dict[str, Any], out: Path, console: Any) -> None:
    """Print verdicts and notes of a comparison, and its table last."""
    from xfuser_cocodiff.lab.comparison import report, summary

    pairs, lines = report.split_by_variant(comparison), []
    for pair in pairs:
        if len(pairs) == 1 or not report.passed(pair):
            lines.append("{}. {}".format(*report.verdict(pair)))
        lines += [note for note in report.notes(pair) if note not in lines]
    for run in comparison["runs"]:
        if run["trace"]:
            lines.append(f"Traces of {run['name']} for https://ui.perfetto.dev: {out / run['trace']}")
        for tensors, fraction in run["overlap"].items():
            lines.append(f"Communication of {tensors} in {run['name']}: {fraction:.0%} hidden behind kernels.")
    lines += summary.exchange_lines(comparison) + summary.error_lines(comparison)
    console.print("", *lines, "", summary.format_table(comparison), "", summary.sentence(comparison), sep="\n")
