"""Soak test: random requests and faults in one process group, each request compared with a fresh process."""

import argparse
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from benchmarks import command_line
from xfuser_cocodiff.cli.output import write_json

FAILED_STATUS = 1
MAX_RANKS = 64
LEAST_TIMEOUT = 30
"""Seconds in which a lost rank is named: a quarter of the timeout, and ten seconds for the answers of the others."""
REQUESTS_PER_FAULT = 10
_ENDLESS = 10**6
"""Requests of a run that `--minutes` ends."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a campaign and return the exit status: 1 if anything failed, hung or was left behind."""
    description = (
        "Runs xDiT's engine with small models on gloo ranks in one process group: random requests, and faults between "
        "them, drawn from a seed. Each request that returns must have the bits of a fresh process: of stock xDiT in "
        "mode exact, of the same mode in lossy ones. No fault may cause a hang, leave anything behind or affect the "
        "next request. Arguments after -- fix what is drawn: --model, --cocodiff_mode, --cocodiff_a2a, "
        "--cocodiff_v_first, --num_inference_steps."
    )
    count = command_line.at_least(0)
    parser = command_line.new_parser("soak", description)
    command_line.add_json(parser)
    ranks = range(2, MAX_RANKS + 1, 2)
    parser.add_argument("--ranks", type=int, default=2, choices=ranks, metavar="N", help="even (%(default)s)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=command_line.at_least(0, float), help="stop after them (default: no limit)")
    length.add_argument("--requests", type=count, help="number of requests (default: 100)")
    parser.add_argument("--distinct", type=command_line.at_least(1), default=40, help="distinct ones (%(default)s)")
    parser.add_argument("--seed", type=int, help="seed of all that is drawn (default: random)")
    parser.add_argument("--faults", default="all", help="kinds of faults, separated by commas, all or none (all)")
    parser.add_argument(
        "--num-faults", type=count, help="(default: one of each kind, or with --minutes one per 10 requests)"
    )
    seconds = command_line.at_least(LEAST_TIMEOUT, float)
    parser.add_argument("--timeout", type=seconds, default=120.0, help="seconds of a request, at most (%(default)g)")
    parser.add_argument("--only", metavar="ITEM", help="replay this item of the seed, such as request:17 or fault:3")
    return command_line.run(parser, _run, argv)


def _run(options: argparse.Namespace) -> int:
    from benchmarks.soak import warm_up

    with tempfile.TemporaryDirectory(prefix="cocodiff-models-") as models:
        warm_up.set_environment(Path(models))
        return _campaign(options, _plan(options), Path(models))


def _interrupt(number: int, _: object) -> NoReturn:
    """Stop as after Ctrl-C: ranks end, temporary files are removed, and the record is written."""
    signal.signal(number, signal.SIG_IGN)  # the end takes some time
    raise KeyboardInterrupt


def _plan(options: argparse.Namespace) -> Any:
    from benchmarks.soak.campaign import FAULT, REQUEST
    from benchmarks.soak.comparison import Plan
    from benchmarks.soak.fault import parse_kinds

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


def _campaign(options: argparse.Namespace, plan: Any, models: Path) -> int:
    from rich.console import Console

    from benchmarks.soak import campaign, report, warm_up
    from benchmarks.soak.request import MODELS
    from xfuser_cocodiff.lab.models import hub
    from xfuser_cocodiff.lab.reporting import host

    signal.signal(signal.SIGTERM, _interrupt)
    print(f"soak: seed {plan.seed}", file=sys.stderr, flush=True)
    hub.write_cache(models, MODELS)
    warm_up.prepare()
    record = campaign.run(plan, lambda text: print(text, file=sys.stderr, flush=True))
    record = {**host.header(), **record}
    try:
        write_json(options, record)
    finally:
        report.show(record, Console(highlight=False, width=None if sys.stdout.isatty() else 160))
    return 0 if report.succeeded(record) else FAILED_STATUS


if __name__ == "__main__":
    sys.exit(main())
