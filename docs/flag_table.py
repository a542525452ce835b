"""Write the table of options in flags.md: python docs/flag_table.py"""

import re
from pathlib import Path

from xfuser_cocodiff.xdit.settings.option import Option
from xfuser_cocodiff.xdit.settings.options import OPTIONS

PAGE = Path(__file__).with_name("flags.md")
HEAD = "| flag | values | meaning |\n|---|---|---|\n"


def page() -> str:
    """Return flags.md with a row for each option."""
    before, _, rest = PAGE.read_text().partition(HEAD)
    _, _, after = rest.partition("\n\n")
    return "".join([before, HEAD, *map(_row, OPTIONS), "\n", after])


def _row(option: Option) -> str:
    choices = ", ".join(f"`{choice}`" for choice in option.choices)
    values = "no value" if option.is_switch else choices or re.sub("'([^']+)'", r"`\1`", option.values)
    return f"| `{option.flag}` | {values} | {option.help} |\n"


if __name__ == "__main__":
    PAGE.write_text(page())
