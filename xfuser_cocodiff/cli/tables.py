"""Tables on the console."""

import sys
from collections.abc import Collection, Sequence

from rich.console import Console
from rich.table import Table

_WIDTH = 200
"""Width of tables in files and pipes, in characters."""


def console() -> Console:
    """Return the console for tables."""
    return Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else _WIDTH)


def table(columns: Sequence[str], texts: Collection[str]) -> Table:
    """Return a table without lines; columns of `texts` are aligned left, those of numbers right."""
    empty = Table(box=None)
    for column in columns:
        empty.add_column(column, justify="left" if column in texts else "right", no_wrap=True)
    return empty
