"""`cocodiff compare`: a command with stock xDiT and with the plugin, and a report."""

import argparse
import sys
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli.answer import fail
from xfuser_cocodiff.lab.emulation.presets import PRESETS

INTERRUPTED_STATUS = 130


def add_parser(subparsers: Any) -> None:
    """Add the command to the parser."""
    parser = subparsers.add_parser(
        "compare",
        help="run a command with stock xDiT and with the plugin, and report",
        description="Runs a command with stock xDiT and with the plugin, same seed, and writes a report.",
        usage="%(prog)s [--out DIR] [--repeats N] [--modes MODES] [--launcher COMMAND | --emulate PRESET "
        "[--topology T] [--scale S]] [--stock DIR] [--trace] [--json FILE] "
        "-- <xdit arguments | script and arguments>",
        epilog="Exit status: 1 when nothing was approximated and the result is not stock's bit for bit, 2 when nothing "
        "was compared.",
    )
    parser.add_argument("--out", type=Path, default=Path("cocodiff-report"), help="folder of the report (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs to measure on each side (%(default)s)")
    parser.add_argument(
        "--modes", help="of the plugin, as exact,balanced,fast: a side each (default: the mode that the arguments name)"
    )
    parser.add_argument(
        "--launcher",
        metavar="COMMAND",
        help="what starts the ranks in place of torchrun, such as 'mpiexec -n {ranks} --ppn 12 rank.sh'; it gives each "
        "one RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, and all of them see the folder of the report",
    )
    _add_emulation(parser)
    parser.add_argument(
        "--stock",
        type=Path,
        metavar="DIR",
        help="take stock's side from an earlier comparison there, which need not have come to its end",
    )
    parser.add_argument("--trace", action="store_true", help="run each side once more, for a trace of its last steps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record here")
    parser.set_defaults(run=run, parser=parser)


def _add_emulation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--emulate",
        metavar="PRESET",
        help=f"run the ranks on a cluster that this machine emulates, with the links of {', '.join(PRESETS)}: each in "
        "a network namespace of its own, on the CPU",
    )
    parser.add_argument(
        "--topology",
        help="of all emulated ranks, such as node=2,gpu=2 (default: that of --cocodiff_topology, else the preset's, "
        "else two nodes)",
    )
    parser.add_argument("--scale", help="multiplies the rates of the preset, 1/10000 of the real ones (default: 1)")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    from rich.console import Console

    from xfuser_cocodiff.lab.comparison import compare, launch, record, report
    from xfuser_cocodiff.lab.reporting import formatting

    if options.json:  # before anything runs for minutes
        options.json.parent.mkdir(parents=True, exist_ok=True)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    if missing := report.missing_libraries():
        return fail(f"the report needs {', '.join(missing)}: {formatting.INSTALL_REPORT_EXTRA}")
    try:
        found = compare.compare(options.xdit_arguments, options.out, console, _how(options))
    except (compare.UsageError, launch.LaunchError, record.RecordError) as error:
        return fail(str(error))
    except KeyboardInterrupt:
        print("cocodiff: interrupted", file=sys.stderr)
        return INTERRUPTED_STATUS
    found["command"] = options.command
    page = report.write(found, options.out)
    if options.json:
        options.json.write_text((options.out / "report.json").read_text())
    _tell(found, options.out, console)
    console.print(f"\nReport: {page}")
    return 0 if report.passed(found) else 1


def _how(options: argparse.Namespace) -> Any:
    """What the options say.

    Raises:
        UsageError: they contradict each other.
    """
    from xfuser_cocodiff.lab.comparison.compare import How, UsageError
    from xfuser_cocodiff.lab.comparison.emulate import Wish

    given = {name: value for name in ("topology", "scale") if (value := getattr(options, name)) is not None}
    if given and options.emulate is None:
        name, value = next(iter(given.items()))
        raise UsageError(f"--{name} {value} is of an emulated cluster: give --emulate as well")
    return How(
        repeats=options.repeats,
        modes=tuple(options.modes.split(",")) if options.modes else (),
        traced=options.trace,
        launcher=options.launcher,
        emulated=Wish(options.emulate, **given) if options.emulate else None,
        earlier=options.stock,
    )


def _tell(found: dict[str, Any], out: Path, console: Any) -> None:
    """Say what came of a comparison; its table comes last."""
    from xfuser_cocodiff.lab.comparison import overview, report

    pairs, said = report.pairs(found), []
    for pair in pairs:
        if len(pairs) == 1 or not report.passed(pair):
            said.append("{}. {}".format(*report.verdict(pair)))
        said += [note for note in report.notes(pair) if note not in said]
    for side in found["runs"]:
        if side["trace"]:
            said.append(f"Traces of the ranks, for https://ui.perfetto.dev: {out / side['trace']}")
        for what, share in side["overlap"].items():
            said.append(f"While {what} travelled, kernels ran on other streams for {share:.0%} of the time.")
    console.print("", *said, "", overview.table(found), "", overview.sentence(found), sep="\n")
