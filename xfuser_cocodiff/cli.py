"""The `cocodiff` command.

A subcommand is one function here that adds its parser and one that runs it, which imports what it needs.
"""

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

USAGE_STATUS = 2
INTERRUPTED_STATUS = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit status: what it says, or 2 for a bad command line."""
    argv = list(sys.argv[1:] if argv is None else argv)
    divide = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(prog="cocodiff", description="Tools around CoCoDiff's plugin for xDiT.")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add_parser in COMMANDS:
        add_parser(subparsers)
    options, unknown = parser.parse_known_args(argv[:divide])
    # What follows -- is xDiT's, and argparse's own treatment of it differs between Python versions.
    options.xdit_arguments = argv[divide + 1 :]
    options.command = shlex.join(["cocodiff", *argv])
    if unknown:
        options.parser.error(f"unknown arguments: {' '.join(unknown)}")
    return options.run(options)


def _add_compare(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "compare",
        help="run a command with stock xDiT and with the plugin, and report",
        description="Runs a command with stock xDiT and with the plugin, same seed, and writes a report.",
        usage="%(prog)s [--out DIR] [--repeats N] [--json FILE] -- <xdit arguments | script.py and its arguments>",
        epilog="Exit status: 1 when the plugin's exact mode is not bit-equal to stock, 2 when nothing was compared.",
    )
    parser.add_argument("--out", type=Path, default=Path("cocodiff-report"), help="folder of the report (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="runs to measure on each side (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record here")
    parser.set_defaults(run=_compare, parser=parser)


def _compare(options: argparse.Namespace) -> int:
    from rich.console import Console

    from xfuser_cocodiff.bench import child, compare, record, report

    if options.json:  # before anything runs for minutes
        options.json.parent.mkdir(parents=True, exist_ok=True)
    console = Console(soft_wrap=True, markup=False, highlight=False)
    if missing := report.missing_libraries():
        return _fail(f"the report needs {', '.join(missing)}: {report.INSTALL}")
    try:
        figures = compare.compare(options.xdit_arguments, options.out, options.repeats, console)
    except (compare.UsageError, child.LaunchError, record.RecordError) as error:
        return _fail(str(error))
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
    return 0 if report.passed(figures) else 1


def _add_env(subparsers: Any) -> None:
    parser = subparsers.add_parser("env", help="versions, platform, detected topology and the patch table")
    parser.add_argument(
        "--degree", type=int, help="Ulysses degree to detect the topology for (default: the launcher's)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write it here")
    parser.set_defaults(run=_env, parser=parser)


def _env(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from xfuser_cocodiff.bench import host
    from xfuser_cocodiff.xdit import environment

    if options.degree is not None and options.degree < 1:
        return _fail(f"--degree {options.degree} is not valid; it starts at 1")
    found = environment.describe(options.degree)
    facts, patches = Table(show_header=False, box=None), Table(box=None)
    for column in ("site", "why", "state"):
        patches.add_column(column, overflow="fold")
    for name, value in environment.facts(found):
        facts.add_row(name, value)
    for row in found.patches:
        patches.add_row(row.site, row.why, row.state)
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)
    console.print(facts, "", patches)
    if options.json:
        _write_json(options, {**host.header(), **dataclasses.asdict(found)})
    return 0 if found.plugin == "installed" else 1


def _add_models(subparsers: Any) -> None:
    parser = subparsers.add_parser("models", help="write small models under the real names as a Hugging Face cache")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="what HF_HOME is to be")
    parser.add_argument("names", nargs="*", metavar="NAME", help="names in xDiT's registry (default: all small models)")
    parser.set_defaults(run=_models, parser=parser)


def _models(options: argparse.Namespace) -> int:
    from xfuser_cocodiff.models import hub

    try:
        written = hub.write_cache(options.out, options.names or None)
    except (ValueError, OSError) as error:
        return _fail(str(error))
    for name, folder in written.items():
        print(f"{name}: {folder}")
    print(f"Use them with: HF_HOME={options.out.resolve()} HF_HUB_OFFLINE=1 xdit --model {next(iter(written))} ...")
    return 0


def _add_bench(subparsers: Any) -> None:
    parser = subparsers.add_parser("bench", help="measure a part of the plugin")
    parser.add_argument("subject", choices=["import"], help="import: what the entry point adds to `import torch`")
    parser.add_argument("--repeats", type=int, default=10, help="measurements (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record here")
    parser.set_defaults(run=_bench, parser=parser)


def _bench(options: argparse.Namespace) -> int:
    from xfuser_cocodiff.bench import import_cost

    if options.repeats < 1:
        return _fail(f"--repeats {options.repeats} is not valid; it starts at 1")
    record = import_cost.measure(options.repeats)
    low, high = (1000 * pick(record["seconds"]) for pick in (min, max))
    print(f"the entry point takes {1000 * record['median_seconds']:.2f} ms of import torch ({low:.2f} to {high:.2f})")
    if options.json:
        _write_json(options, record)
    return 0


def _write_json(options: argparse.Namespace, record: dict[str, Any]) -> None:
    """Write a record where --json says."""
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({**record, "command": options.command}, indent=2) + "\n")


def _fail(message: str) -> int:
    print(f"cocodiff: {message}", file=sys.stderr)
    return USAGE_STATUS


COMMANDS: tuple[Callable[[Any], None], ...] = (_add_compare, _add_env, _add_models, _add_bench)
"""One function per subcommand; each sets `run`, which takes the options and returns the exit status, and `parser`."""


if __name__ == "__main__":
    sys.exit(main())
