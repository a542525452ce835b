"""`cocodiff bench frontier`: table and picture of the records that compare methods by bytes and PSNR."""

import argparse
from pathlib import Path
from typing import Any

from xfuser_cocodiff.cli.output import fail


def add_parser(subjects: Any) -> None:
    """Add the subject to the parser of `cocodiff bench`."""
    parser = subjects.add_parser(
        "frontier",
        help="table and picture of methods by bytes and PSNR, from records in a folder",
        description="Prints bytes on slow links and PSNR of modes and of the codecs of other systems as Markdown, by "
        "model and number of steps. Nothing is measured.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of `bench all --only frontier --out DIR`")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the table into this page")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot PSNR by bytes, a panel for each record")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Run the subject and return its exit status."""
    from xfuser_cocodiff.lab.cluster_bench.page_tables import replace_parts
    from xfuser_cocodiff.lab.comparison import frontier

    try:
        records = frontier.read_folder(options.folder)
        lines = frontier.table(records)
        if options.plot:
            frontier.draw(records, options.plot)
        if options.page:
            options.page.write_text(replace_parts(options.page.read_text(), {"frontier-table": ["", *lines, ""]}))
    except (ValueError, OSError) as error:
        return fail(str(error))
    print("\n".join(lines))
    return 0
