"""`cocodiff plan`: predicts whether the plugin pays for a full-size model on a machine, and with which flags."""

import argparse
import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli.output import fail, positive, write_json
from xfuser_cocodiff.engine.compression.default_mode import EXACT, MODES

# Importing `machines` would make --help slow.
MACHINES = [*json.loads((Path(__file__).parents[1] / "tools/simulation/machines.json").read_text())]
_STOCK = "stock"


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the parser."""
    parser = subparsers.add_parser(
        "plan",
        help="what would it gain, with which flags?",
        description="Predicts steps of stock in its fastest split into Ulysses and Ring, and of each mode in its "
        "fastest, on a known machine or with your links. Nothing is run.",
    )
    parser.add_argument("--model", required=True, help="such as FLUX.1-dev, FLUX.2-dev, SD3.5, Qwen-Image, Wan2.1")
    parser.add_argument("--resolution", type=int, required=True, help="pixels per side; for a 16:9 video, its rows")
    machine = parser.add_mutually_exclusive_group(required=True)
    machine.add_argument("--machine", type=_dashes, choices=MACHINES, help="known machine")
    machine.add_argument("--profile", type=Path, metavar="FILE", help="what `cocodiff probe --json` wrote on all ranks")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--nodes", type=positive, help="nodes of the machine")
    size.add_argument("--ranks", type=positive, help="ranks of the machine, in place of nodes")
    parser.add_argument("--mode", type=_dashes, choices=MODES, help="list all splits of this mode (default: all modes)")
    parser.add_argument(
        "--record",
        type=Path,
        metavar="DIR",
        help="COCODIFF_RECORD folder of your lossy run, whose change per step sets the bits (default: that published "
        "of FLUX.1-dev)",
    )
    parser.add_argument("--steps", type=positive, default=28, help="denoising steps (%(default)s)")
    parser.add_argument("--batch", type=positive, default=1, help="number of images (%(default)s)")
    parser.add_argument("--text-tokens", type=positive, help="text tokens (default: the pipeline's; Qwen-Image: 128)")
    parser.add_argument(
        "--tflops", type=float, help="what linear layers and attention reach on your device; needed with --profile"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the record to this file")
    parser.set_defaults(run=run, parser=parser)


def _dashes(text: str) -> str:
    return text.lower().replace("_", "-")


def run(options: argparse.Namespace) -> int:
    """Run the subcommand and return its exit status."""
    from xfuser_cocodiff.tools.simulation import plan

    names = ("model", "resolution", "nodes", "ranks", "machine", "profile", "mode", "steps", "batch", "text_tokens")
    try:
        if options.tflops is not None and not options.tflops > 0:
            raise ValueError(f"--tflops {options.tflops:g} is not valid; it must be greater than 0")
        given = {name: getattr(options, name) for name in names}
        record = plan.record(**given, teraflops=options.tflops, recorded=options.record)
    except ValueError as error:
        return fail(str(error))
    show(record)
    write_json(options, record)
    return 0


def show(record: Mapping[str, Any]) -> None:
    """Print a record."""
    from xfuser_cocodiff.cli import tables
    from xfuser_cocodiff.tools.reporting.formatting import NOT_MEASURED, format_bytes, format_seconds

    console = tables.console()
    batch = f", batch {record['batch']}" if record["batch"] > 1 else ""
    tokens = record["tokens_per_rank"]
    console.print(
        f"{record['model']}, {record['resolution']} px{batch}, {record['steps']} steps; {record['ranks']} ranks, "
        f"{record['topology']}, {record['machine']}; predicted, not measured",
        f"{record['heads']} heads; tokens per rank: {tokens['image']} image, {tokens['text']} text",
        *record["remarks"],
        *([f"problem: {record['problem']}"] if record["problem"] else []),
        sep="\n",
    )
    texts = ("", "Ulysses x Ring", "K, V gathered", "bytes", "references", "coded layers")
    table = tables.table((*texts, "compute", "Ulysses", "ring", "host", "step time", "speedup"), texts)
    for row in record["rows"]:
        split, sent = row["split"], Counter[str](row["sent_bytes"])
        sent.update(row["ring_bytes"])
        has_two = split["ring"] > 1 and split["ulysses"] > 1
        table.add_row(
            f"best {_STOCK}" if row["mode"] == _STOCK else row["mode"],
            f"{split['ulysses']} x {split['ring']}{' ' + split['placement'] if has_two else ''}",
            "+".join(row["gathered"]) or NOT_MEASURED,
            ", ".join(f"{axis} {format_bytes(count)}" for axis, count in sent.items()),
            f"{row['reference_bytes'] / 2**30:.2f} GiB" if row["reference_bytes"] else NOT_MEASURED,
            f"{row['coded_layers']} of {row['layers']}" if "layers" in row else NOT_MEASURED,
            *(format_seconds(row[f"{part}_seconds"]) for part in ("compute", "a2a", "ring", "host", "step")),
            f"{row['speedup']:.2f}x" if row["speedup"] else NOT_MEASURED,
        )
    console.print(table)
    for line in _notes(record):
        console.print(line, soft_wrap=True)


def _notes(record: Mapping[str, Any]) -> list[str]:
    """Return what to know about the table, and the flags of each row."""
    from xfuser_cocodiff.tools.reporting.formatting import format_percent
    from xfuser_cocodiff.tools.simulation import assumed_change

    own_run = "; --record takes that of a run of yours" if record["assumption"] == assumed_change.DESCRIPTION else ""
    notes = [
        "bytes and seconds are those of a rank and step; references: memory of a rank",
        f"bits of lossy modes: for {record['assumption']}{own_run}",
    ]
    by_mode = {row["mode"]: row for row in record["rows"]}
    if share := by_mode.get(_STOCK, {}).get("communication_share"):
        notes.append(f"communication share of stock's step, all-to-alls only: {format_percent(share)}")
    if any(row["is_left_lossless"] for row in by_mode.values()):
        notes.append(
            "lossy modes code nothing: coding would add more host time than it saves link time; --cocodiff_slow_axes "
            "names axes to compress all the same"
        )
    elif not any(row["reference_bytes"] for row in by_mode.values()) and {*by_mode} - {_STOCK, EXACT}:
        notes.append("lossy modes code nothing: no axis is slow for this device; --cocodiff_slow_axes names axes")
    fix_first = " (after fixing the problem above)" if record["problem"] else ""
    fastest = {row["mode"]: row["flags"] for row in reversed(record["rows"])}
    return [*notes, f"flags{fix_first}:", *(f"  {mode}: {text}" for mode, text in reversed(fastest.items()))]
