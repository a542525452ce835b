"""docs/flags.md has a row for every option, made from the options, and one for every variable that users may set."""

import importlib.util
from pathlib import Path

from xfuser_cocodiff.engine.topology.launcher import CLUSTER_VARIABLE
from xfuser_cocodiff.xdit.settings.variables import OTHER_VARIABLES

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "flags.md").read_text()
INTERNAL = {CLUSTER_VARIABLE}
"""Variables that only the plugin's own commands set."""


def test_the_table_of_options_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("flag_table", DOCS / "flag_table.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.page() == PAGE, "run python docs/flag_table.py"


def test_every_variable_without_a_flag_has_a_row() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| `COCODIFF_")]
    documented = [row.split(" | ")[0].strip("| `") for row in rows]
    assert sorted(documented) == sorted({*OTHER_VARIABLES} - INTERNAL)
