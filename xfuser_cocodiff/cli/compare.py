"""`cocodiff compare`: a command with stock xDiT and with the plugin, and a report."""

import argparse
import sys
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli.answer import fail

INTERRUPTED_STATUS = 130


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "compare",
        help="run a command with stock xDiT and with the plugin, and report",
        description="Runs a command with stock xDiT and with the plugin, same seed, and writes a report.",
        usage="%(prog)s [--out DIR] [--repeats N] [--launcher COMMAND] [--stock DIR] [--trace] [--json FILE] "
        "-- <xdit arguments | script and arguments>",
        epilog="Exit status: 1 when nothing was approximated and the result is not stock's bit for bit, 2 when nothing "
        "was compared.",
    )
    parser.add_argument("--out", type=Path, default=Path("cocodiff-report"), help="folder of the report (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs to measure on each side (%(default)s)")
    parser.add_argument(
        "--launcher",
        metavar="COMMAND",
        help="what starts the ranks in place of torchrun, such as 'mpiexec -n {ranks} --ppn 12 rank.sh'; it gives each "
        "one RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, and all of them see the folder of the report",
    )
    parser.add_argument(
        "--stock",
        type=Path,
        metavar="DIR",
        help="take stock's side from an earlier comparison there, which need not have come to its end",
    )
    parser.add_argument("--trace", action="store_true", help="run each side once more, for a trace of its last steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record here")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    from rich.console import Console

    from xfuser_cocodiff.bench import child, compare, record, report

    if options.json:  # before anything runs for minutes
        options.json.parent.mkdir(parents=True, exist_ok=True)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    if missing := report.missing_libraries():
        return fail(f"the report needs {', '.join(missing)}: {report.INSTALL}")
    try:
        figures = compare.compare(
            options.xdit_arguments,
            options.out,
            options.repeats,
            console,
            options.trace,
            options.launcher,
            options.stock,
        )
    except (compare.UsageError, child.LaunchError, record.RecordError) as error:
        return fail(str(error))
    except KeyboardInterrupt:
        print("cocodiff: interrupted", file=sys.stderr)
        return INTERRUPTED_STATUS
    figures["command"] = options.command
    page = report.write(figures, options.out)
    if options.json:
        options.json.write_text((options.out / "report.json").read_text())
    title, text = report.verdict(figures)
    for line in (f"\n{title}. {text}", report.speed(figures), *report.notes(figures), f"\nReport: {page}"):
        console.print(line)
    for side in figures["runs"]:
        if side["trace"]:
            console.print(f"Trace, for https://ui.perfetto.dev: {options.out / side['trace']}")
        for what, share in side["overlap"].items():
            console.print(f"While {what} travelled, kernels ran on other streams for {share:.0%} of the time.")
    return 0 if report.passed(figures) else 1
