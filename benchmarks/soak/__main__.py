"""Soak test: random requests and faults in one process group, each request compared with a fresh process."""

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import command_line
from benchmarks.soak import job
from benchmarks.soak.campaign import Campaign, Plan
from benchmarks.soak.request import MODELS
from xfuser_cocodiff.cli.output import positive, write_json


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
    parser.add_argument("--ranks", type=int, default=2, choices=range(2, 65, 2), metavar="N", help="even (%(default)s)")
    parser.add_argument("--requests", type=positive, default=1000, help="at most (%(default)s)")
    parser.add_argument("--minutes", type=float, help="stop after them (default: no limit)")
    parser.add_argument("--first", type=int, default=0, help="number of the first request (%(default)s)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="(random)")
    return command_line.run(parser, _run, argv)


def _run(options: argparse.Namespace) -> int:
    seconds = options.minutes and 60 * options.minutes
    plan = Plan(options.seed, options.ranks, options.requests, options.first, seconds)
    with tempfile.TemporaryDirectory(prefix="cocodiff-soak-", ignore_cleanup_errors=True) as folder:
        models = Path(folder, "models")
        job.prepare(models)
        from small_models import hub
        from xfuser_cocodiff.tools.reporting import record_header

        hub.write_cache(models, MODELS)
        campaign = Campaign(plan, Path(folder), lambda text: print(text, file=sys.stderr, flush=True))
        print(f"soak: seed {plan.seed}", file=sys.stderr, flush=True)
        campaign.run()
        record = campaign.record()
        write_json(options, {**record_header.header(), **record})
    print(f"seed {plan.seed}: {record['equal_requests']} requests equal {record['fresh_processes']} fresh processes")
    print(f"faults with the expected consequence: {record['faults']}")
    for failure in record["failures"]:
        print(f"FAILED {failure['number']}: {failure['cause']}\n  {failure['request']}")
    return 1 if record["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
