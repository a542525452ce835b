"""`cocodiff bench tables`: tables and pictures of the records of `cocodiff bench cluster`."""

import argparse
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli.output import fail


def add_parser(subjects: Any) -> None:
    """Add the subject to the parser of `cocodiff bench`."""
    parser = subjects.add_parser(
        "tables",
        help="tables and pictures of the records of `bench cluster` in a folder",
        description="Prints the paper's table on Aurora, and speedups by machine and mode, as Markdown. Nothing is "
        "measured. Where some speedups were measured, predicted ones are in italics. Cells with --launch_us are left "
        "out.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of files that `bench cluster --json` wrote")
    parser.add_argument(
        "--quality",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="PSNR: what `cocodiff quality --json` wrote (default: none)",
    )
    parser.add_argument("--page", type=Path, metavar="FILE", help="write tables, and links to pictures, into this page")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot speedup by PSNR, one picture per machine")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the subject and return its exit status."""
    from xfuser_cocodiff.lab.cluster_bench import frontier_chart, page_tables, record_files
    from xfuser_cocodiff.lab.cluster_bench.paper_table import paper_table
    from xfuser_cocodiff.lab.cluster_bench.quality_record import QualityRecord
    from xfuser_cocodiff.lab.cluster_bench.speedup_table import speedup_table

    try:
        cells = record_files.read_folder(options.folder, QualityRecord.read_all(options.quality or []))
        cells = record_files.with_own_launch_time(cells)  # a mean with CUDA graphs would be of no machine
        parts = {"paper-table": paper_table(cells), "speedup-table": speedup_table(cells)}
        if all(cell["predicted"] for cell in cells):
            parts = {name: [line.replace("*", "") for line in lines] for name, lines in parts.items()}
        if options.plot:
            pictures = frontier_chart.draw({"cells": cells}, options.plot)
            parts["frontier-pictures"] = page_tables.picture_lines(pictures, options.page or options.plot)
        if options.page:
            options.page.write_text(page_tables.replace_parts(options.page.read_text(), parts))
    except (ValueError, OSError) as error:
        return fail(str(error))
    print("\n\n".join("\n".join(lines) for lines in parts.values()))
    return 0
