"""What the user says in vain is named, once, and nothing else is."""

import os
import re
from pathlib import Path

import pytest

from tests import ranks
from xfuser_cocodiff.engine.settings import ignored_options
from xfuser_cocodiff.engine.settings.config import resolve
from xfuser_cocodiff.engine.settings.options import OPTIONS, OTHER_VARIABLES
from xfuser_cocodiff.engine.settings.ring_placement import SequenceRanks
from xfuser_cocodiff.engine.topology.topology import Topology

ROOT = Path(__file__).parents[3]


def warnings(values: dict, environment: dict, ring_degree: int = 1) -> list[str]:
    degree = 1 if "cocodiff_virtual" in values else 4
    ranks = SequenceRanks(degree, Topology.flat(degree), ring_degree, Topology.flat(degree * ring_degree))
    return ignored_options.warnings(values, environment, resolve(values, environment, ranks), ring_degree)


USED = {"use_cocodiff": True}


@pytest.mark.parametrize(
    ("values", "environment", "expected"),
    [
        ({}, {}, []),
        (
            {},
            {
                "COCODIFF_ENABLE": "0",
                "COCODIFF_SHARE_DEVICE": "1",
                "COCODIFF_RECORD": "r",
                "COCODIFF_LOG_LEVEL": "info",
                "HOME": "h",
            },
            [],
        ),
        (
            {"cocodiff_topology": "2x2"},
            {"COCODIFF_MODE": "fast", "COCODIFF_TOPOLOGY": "4"},
            ["--cocodiff_topology, COCODIFF_MODE: no effect without --use_cocodiff"],
        ),
        (
            USED | {"cocodiff_mode": "exact", "cocodiff_slow_axes": "flat"},
            {"COCODIFF_MAX_ERROR": "0.1", "COCODIFF_MEMORY_BUDGET": "2"},
            ["--cocodiff_slow_axes, COCODIFF_MAX_ERROR, COCODIFF_MEMORY_BUDGET: no effect in mode 'exact'"],
        ),
        (USED | {"cocodiff_mode": "fast", "cocodiff_slow_axes": "flat", "cocodiff_max_error": "1"}, {}, []),
        (USED, {"COCODIFF_RING": "outer"}, ["COCODIFF_RING: no effect without --ring_degree above 1"]),
        (
            USED
            | {"cocodiff_virtual": "2x2", "cocodiff_a2a": "flat", "cocodiff_timeout": "9", "cocodiff_ring": "outer"},
            {"COCODIFF_V_FIRST": "on", "COCODIFF_HEAD_GROUPS": "2", "COCODIFF_TOPOLOGY": "flat"},
            [
                "COCODIFF_TOPOLOGY, --cocodiff_ring, --cocodiff_a2a, --cocodiff_timeout, COCODIFF_V_FIRST, "
                "COCODIFF_HEAD_GROUPS: no effect with --cocodiff_virtual: one rank does not communicate"
            ],
        ),
        (
            {},
            {"COCODIFF_TOPLOGY": "4"},
            ["COCODIFF_TOPLOGY is not a variable of the plugin; the nearest is COCODIFF_TOPOLOGY"],
        ),
        (USED, {"COCODIFF_XYZ123": ""}, ["COCODIFF_XYZ123 is not a variable of the plugin"]),
        (USED, {"COCODIFF_TOPOLOGY": "2x2", "COCODIFF_A2A": "flat"}, []),
    ],
)
def test_what_has_no_effect(values: dict, environment: dict, expected: list[str]) -> None:
    assert warnings(values, environment) == expected


def test_a_ring_heeds_its_option() -> None:
    assert warnings(USED | {"cocodiff_ring": "outer"}, {}, ring_degree=2) == []


def test_every_variable_that_the_project_reads_is_known() -> None:
    known = {*(option.variable for option in OPTIONS), *OTHER_VARIABLES}
    places = [ROOT / "setup.py", *(ROOT / "xfuser_cocodiff").rglob("*.py"), *(ROOT / "scripts").rglob("*")]
    text = "".join(file.read_text() for file in places if file.is_file() and file.suffix not in (".pyc", ".png"))
    assert {name for name in re.findall(r"COCODIFF_[A-Z_0-9]+", text) if not name.endswith("_")} - known == set()


def warned(rank: int) -> list[str]:
    """What settings say that nobody asked for, made twice."""
    from xfuser import xFuserArgs

    from xfuser_cocodiff.xdit.integration import flags

    said: list[str] = []
    flags.warn_once = said.append
    os.environ["COCODIFF_MODES"] = "fast"
    xFuserArgs(model="tiny", cocodiff_a2a="flat").create_config()
    return said


def test_settings_that_nobody_asked_for_warn_too() -> None:
    assert ranks.run(warned, 1) == [
        [
            "COCODIFF_MODES is not a variable of the plugin; the nearest is COCODIFF_MODE",
            "--cocodiff_a2a: no effect without --use_cocodiff",
        ]
    ]
