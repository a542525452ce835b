"""Tables on the console."""

from collections.abc import Collection, Sequence

from rich.console import Console
from rich.table import Table

_WIDTH = 200
"""Width of all tables, in characters: a narrower terminal wraps their lines, where Rich would cut cells off."""


def console() -> Console:
    """Return the console for tables."""
    return Console(highlight=False, markup=False, width=_WIDTH)


def table(columns: Sequence[str], texts: Collection[str]) -> Table:
    """Return a table without lines; columns of `texts` are aligned left, those of numbers right."""
    empty = Table(box=None)
    for column in columns:
        empty.add_column(column, justify="left" if column in texts else "right", no_wrap=True)
    return empty
