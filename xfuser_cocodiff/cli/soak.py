"""`cocodiff soak`: random requests and faults in one process group, each request compared with a fresh process."""

import argparse
import random
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from xfuser_cocodiff.cli.output import fail, write_json

FAILED_STATUS = 1
MAX_RANKS = 64
LEAST_TIMEOUT = 30
"""Seconds in which a lost rank is named: a quarter of the timeout, and ten seconds for the answers of the others."""
REQUESTS_PER_FAULT = 10
_ENDLESS = 10**6
"""Requests of a run that `--minutes` ends."""


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the parser."""
    parser = subparsers.add_parser(
        "soak",
        help="run random requests and faults, and compare each request with a fresh process",
        description="Runs xDiT's engine with small models on gloo ranks in one process group: random requests, and "
        "faults between them, drawn from a seed. Each request that returns must have the bits of a fresh process: of "
        "stock xDiT in mode exact, of the same mode in lossy ones. No fault may cause a hang, leave anything behind "
        "or affect the next request. Arguments after -- fix what is drawn: --model, --cocodiff_mode, --cocodiff_a2a, "
        "--cocodiff_v_first, --num_inference_steps.",
    )
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks, even (%(default)s)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, metavar="M", help="stop after this time (default: no limit)")
    length.add_argument("--requests", type=int, metavar="N", help="number of requests (default: 100)")
    parser.add_argument("--distinct", type=int, default=40, metavar="N", help="distinct requests (%(default)s)")
    parser.add_argument("--seed", type=int, help="seed of all that is drawn (default: random)")
    parser.add_argument(
        "--faults", default="all", metavar="KINDS", help="kinds of faults, separated by commas, all or none (all)"
    )
    parser.add_argument(
        "--num-faults",
        type=int,
        metavar="N",
        help="number of faults (default: one of each kind, or with --minutes one per 10 requests)",
    )
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="SECONDS", help="longest time of a request (%(default)g)"
    )
    parser.add_argument(
        "--only", metavar="ITEM", help="run only this item of the seed, such as request:17 or fault:3, to replay it"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record to this file")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status: 1 if anything failed, hung or was left behind."""
    from xfuser_cocodiff.lab.soak import warm_up

    try:
        _check(options)
    except ValueError as error:
        return fail(str(error))
    with tempfile.TemporaryDirectory(prefix="cocodiff-models-") as models:
        warm_up.set_environment(Path(models))
        try:
            plan = _plan(options)
        except ValueError as error:
            return fail(str(error))
        return _run(options, plan, Path(models))


def _check(options: argparse.Namespace) -> None:
    """Raise ValueError if a number is not valid."""
    if options.ranks % 2 or not 2 <= options.ranks <= MAX_RANKS:
        raise ValueError(f"--ranks {options.ranks} is not valid; valid are even numbers from 2 to {MAX_RANKS}")
    for name, least in (("requests", 0), ("distinct", 1), ("num_faults", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} {value} is not valid; valid are numbers from {least}")
    if options.minutes is not None and not 0 < options.minutes < float("inf"):
        raise ValueError(f"--minutes {options.minutes:g} is not valid; valid are numbers above 0")
    if options.json:
        try:
            options.json.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--json {options.json} cannot be written: {error.strerror}") from None
    if not LEAST_TIMEOUT <= options.timeout < float("inf"):
        raise ValueError(f"--timeout {options.timeout:g} is not valid; valid are numbers from {LEAST_TIMEOUT}")


def _interrupt(number: int, _: object) -> NoReturn:
    """Stop as after Ctrl-C: ranks end, temporary files are removed, and the record is written."""
    signal.signal(number, signal.SIG_IGN)  # the end takes some time
    raise KeyboardInterrupt


def _plan(options: argparse.Namespace) -> Any:
    from xfuser_cocodiff.lab.soak.campaign import FAULT, REQUEST
    from xfuser_cocodiff.lab.soak.comparison import Plan
    from xfuser_cocodiff.lab.soak.fault import parse_kinds

    kinds = parse_kinds(options.faults)
    only = None
    if options.only is not None:
        kind, _, number = options.only.partition(":")
        if kind not in (REQUEST, FAULT) or not number.isdecimal() or (kind == FAULT and not kinds):
            raise ValueError(f"--only {options.only} is not valid; valid are request:N and fault:N")
        if options.seed is None:
            raise ValueError("--only needs the --seed of the run to replay")
        only = kind, int(number)
    requests = options.requests if options.requests is not None else _ENDLESS if options.minutes else 100
    default = requests // REQUESTS_PER_FAULT if options.minutes else len(kinds)
    num_faults = default if options.num_faults is None else options.num_faults
    return Plan(
        seed=random.SystemRandom().randrange(10**6) if options.seed is None else options.seed,
        ranks=options.ranks,
        requests=requests,
        faults=num_faults if kinds else 0,
        kinds=kinds,
        distinct=options.distinct,
        seconds=options.minutes and 60 * options.minutes,
        timeout=options.timeout,
        fixed=tuple(options.xdit_arguments),
        only=only,
    )


def _run(options: argparse.Namespace, plan: Any, models: Path) -> int:
    from rich.console import Console

    from xfuser_cocodiff.lab.models import hub
    from xfuser_cocodiff.lab.reporting import host
    from xfuser_cocodiff.lab.soak import campaign, report, warm_up
    from xfuser_cocodiff.lab.soak.request import MODELS

    signal.signal(signal.SIGTERM, _interrupt)
    print(f"cocodiff soak: seed {plan.seed}", file=sys.stderr, flush=True)
    hub.write_cache(models, MODELS)
    warm_up.prepare()
    record = campaign.run(plan, lambda text: print(text, file=sys.stderr, flush=True))
    record = {**host.header(), **record}
    try:
        write_json(options, record)
    finally:
        report.show(record, Console(highlight=False, width=None if sys.stdout.isatty() else 160))
    return 0 if report.succeeded(record) else FAILED_STATUS
