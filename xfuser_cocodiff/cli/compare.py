"""`cocodiff compare`: compares runs of stock xDiT and of the plugin, and writes a report."""

import argparse
import contextlib
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli.output import fail, positive, write_json
from xfuser_cocodiff.engine.compression.default_mode import MODES

INTERRUPTED_STATUS = 130


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the parser."""
    parser = subparsers.add_parser(
        "compare",
        help="is it faster here, and is it the same image?",
        description="Runs your command with stock xDiT and with the plugin, at the same seed. Or reads runs that you "
        "recorded with COCODIFF_RECORD=DIR, stock's first. Writes a report of speedup and quality.",
        usage="%(prog)s [--out DIR] [--repeats N] [--json FILE] "
        "([--modes MODES] [--launcher COMMAND] -- <xdit arguments | script and arguments> | DIR DIR [DIR ...])",
        epilog="Exit status: 1 if a lossless run is not bit-identical to stock, 2 if the comparison failed, else 0.",
    )
    parser.add_argument("records", nargs="*", type=Path, metavar="DIR", help="folders of recorded runs, of all ranks")
    parser.add_argument(
        "--out", type=Path, default=Path("cocodiff-report"), metavar="DIR", help="folder of the report (%(default)s)"
    )
    parser.add_argument(
        "--repeats", type=positive, default=3, metavar="N", help="runs of stock and of each mode (%(default)s)"
    )
    parser.add_argument(
        "--modes",
        type=_modes,
        default=(),
        help=f"modes to compare, such as exact,balanced, of {', '.join(MODES)} (default: that of your command)",
    )
    parser.add_argument(
        "--launcher",
        type=_words,
        metavar="COMMAND",
        help="what starts the ranks instead of torchrun, such as 'mpiexec -n {ranks} --ppn 12 ./start_rank'; it must "
        "set torchrun's variables, and all ranks must see the --out folder",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record to this file")
    parser.set_defaults(run=run, parser=parser)


def _modes(text: str) -> tuple[str, ...]:
    modes = tuple(text.split(","))
    if not {*modes} <= {*MODES} or len({*modes}) < len(modes):
        raise argparse.ArgumentTypeError(f"{text!r} is not valid; valid are {', '.join(MODES)}, each at most once")
    return modes


def _words(text: str) -> list[str]:
    with contextlib.suppress(ValueError):
        if words := shlex.split(text):
            return words
    raise argparse.ArgumentTypeError(f"{text!r} is not valid; valid is a command line")


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    from xfuser_cocodiff.cli import tables
    from xfuser_cocodiff.tools.comparison import compare, launch, record, report, report_table
    from xfuser_cocodiff.tools.launching import command_line
    from xfuser_cocodiff.tools.launching.command_line import option_value
    from xfuser_cocodiff.tools.reporting import formatting

    if missing := report.missing_libraries():
        return fail(f"the report needs {', '.join(missing)}: {formatting.INSTALL_REPORT_EXTRA}")
    if len(options.records) == 1 or (options.records and options.xdit_arguments):
        return fail("give two folders of records or more, stock's first, or a command after --")
    try:
        folders, repeats = options.records, options.repeats
        if not folders:
            arguments = options.xdit_arguments
            if given := not command_line.is_script(arguments) and option_value(arguments, "num_iterations"):
                repeats = positive(given)
            folders = launch.launch_variants(arguments, options.out, repeats, options.modes, options.launcher)
        options.out.mkdir(parents=True, exist_ok=True)
        comparison = {**compare.compare(folders, options.out, repeats), "command": options.command}
    except argparse.ArgumentTypeError as error:
        return fail(f"--num_iterations {error}")
    except (ValueError, launch.LaunchError, record.RecordError) as error:
        return fail(str(error))
    except KeyboardInterrupt:
        print("cocodiff: interrupted", file=sys.stderr)
        return INTERRUPTED_STATUS
    page = report.write(comparison, options.out)
    write_json(options, comparison)
    print("", *_lines(comparison), "", sep="\n")
    rows = report_table.table_rows(comparison)
    table = tables.table([*rows[0]], ("", "result"))
    for row in rows:
        table.add_row(*row.values())
    tables.console().print(table)
    print("", report_table.sentence(comparison), "", f"Report: {page}", sep="\n")
    return 0 if report.passed(comparison) else 1


def _lines(comparison: dict[str, Any]) -> Sequence[str]:
    """Return verdicts and notes of a comparison."""
    from xfuser_cocodiff.tools.comparison import report, report_table
    from xfuser_cocodiff.tools.reporting.formatting import NOT_MEASURED, format_bytes

    pairs, lines = report.split_by_variant(comparison), []
    for pair in pairs:
        if len(pairs) == 1 or not report.passed(pair):
            lines.append("{}. {}".format(*report.verdict(pair)))
        lines += [note for note in report.notes(pair) if note not in lines]
    for run in comparison["runs"]:
        if run["exchange"]:
            sent = ", ".join(f"{stage} {format_bytes(count)}" for stage, count in (run["bytes"] or {}).items())
            how = ", ".join(f"{axis} {each}" for axis, each in run["exchange"].items())
            lines.append(f"Collectives of {run['name']}: {how}; sent: {sent or NOT_MEASURED}")
    lines += [
        f"{run['name']}: {report_table.error_text(run)}" for run in comparison["runs"] if run["mean_error"] is not None
    ]
    return lines
