"""Soak test: random requests and faults in one process group, each request compared with a fresh process."""

import argparse
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import command_line
from benchmarks.soak import job
from benchmarks.soak.faults import ERRORS
from benchmarks.soak.request import MODELS, MODES
from xfuser_cocodiff.cli.output import write_json

LEAST_TIMEOUT = 30
"""Seconds in which a lost rank is named: a quarter of the timeout, and ten seconds for the answers of the others."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a campaign and return the exit status: 1 if a request failed, had other bits or hung."""
    description = (
        "Runs xDiT's engine with small models on gloo ranks in one process group: requests, and faults in some of "
        "them, drawn from a seed. Each request that returns must have the bits of a fresh process: of stock xDiT in "
        "mode exact, of the same mode in lossy ones. No fault may cause a hang or affect the next request. To replay "
        "request 17: --seed of the run, --first 17 --requests 1."
    )
    parser = command_line.new_parser("soak", description)
    command_line.add_json(parser)
    count, number = command_line.at_least(1), command_line.at_least(0)
    parser.add_argument("--ranks", type=int, default=2, choices=range(2, 65, 2), metavar="N", help="even (%(default)s)")
    parser.add_argument("--requests", type=count, help="at most (default: 100, with --minutes no limit)")
    parser.add_argument("--minutes", type=command_line.at_least(0, float), help="stop after them (default: no limit)")
    parser.add_argument("--first", type=number, default=0, help="number of the first request (%(default)s)")
    parser.add_argument("--distinct", type=count, default=40, help="distinct requests (%(default)s)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="(random)")
    parser.add_argument("--faults", nargs="*", choices=ERRORS, default=[*ERRORS], help="or nothing (default: all)")
    parser.add_argument("--fault-every", type=count, default=10, metavar="N", help="every Nth request (%(default)s)")
    seconds = command_line.at_least(LEAST_TIMEOUT, float)
    parser.add_argument("--timeout", type=seconds, default=120.0, help="seconds of a request (%(default)g)")
    parser.add_argument("--model", choices=MODELS, help="of all requests (default: drawn)")
    parser.add_argument("--mode", choices=MODES, help="of all requests (default: drawn)")
    return command_line.run(parser, _run, argv)


def _run(options: argparse.Namespace) -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    with tempfile.TemporaryDirectory(prefix="cocodiff-soak-", ignore_cleanup_errors=True) as folder:
        models = Path(folder, "models")
        job.prepare(models)
        from benchmarks.soak.campaign import Campaign, Plan
        from models import hub
        from xfuser_cocodiff.tools.reporting import record_header

        hub.write_cache(models, MODELS)
        given = vars(options)
        names = ("seed", "ranks", "faults", "fault_every", "distinct", "first", "timeout", "model", "mode")
        plan = Plan(
            **{name: given[name] for name in names},
            requests=options.requests or (10**6 if options.minutes else 100),
            seconds=options.minutes and 60 * options.minutes,
        )
        campaign = Campaign(plan, Path(folder), lambda text: print(text, file=sys.stderr, flush=True))
        print(f"soak: seed {plan.seed}", file=sys.stderr, flush=True)
        try:
            campaign.run()
        except KeyboardInterrupt:
            print("interrupted; the record has what ran so far", file=sys.stderr)
        record = campaign.record()
        write_json(options, {**record_header.header(), **record})
    print(f"seed {plan.seed}: {record['equal_requests']} requests equal {record['fresh_processes']} fresh processes")
    print(f"faults with the expected consequence: {record['faults']}")
    for when, sample in zip(("first", "last"), record["samples"][:: max(1, len(record["samples"]) - 1)], strict=False):
        print(f"held after the {when} request, by rank: {sample}")
    for failure in record["failures"]:
        print(f"FAILED {failure['number']}: {failure['cause']}\n  {failure['request']}")
    return 1 if record["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
