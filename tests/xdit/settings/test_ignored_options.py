"""Options and variables without effect are named in one warning each, and others are not."""

import pytest

from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.settings import ignored_options
from xfuser_cocodiff.xdit.settings.resolve import resolve
from xfuser_cocodiff.xdit.settings.ring_placement import SequenceRanks


def warnings(values: dict, environment: dict) -> list[str]:
    ranks = SequenceRanks(4, Topology.flat(4))
    return ignored_options.warnings(values, environment, resolve(values, environment, ranks))


ENABLED = {"use_cocodiff": True}


@pytest.mark.parametrize(
    ("values", "environment", "expected"),
    [
        ({}, {"COCODIFF_ENABLE": "0", "COCODIFF_RECORD": "r", "COCODIFF_LOG_LEVEL": "info", "HOME": "h"}, []),
        (
            {"cocodiff_topology": "2x2"},
            {"COCODIFF_MODE": "fast", "COCODIFF_TOPOLOGY": "4"},
            ["--cocodiff_topology, COCODIFF_MODE: no effect without --use_cocodiff"],
        ),
        (
            ENABLED | {"cocodiff_mode": "exact", "cocodiff_slow_axes": "flat"},
            {"COCODIFF_MEMORY_BUDGET": "2"},
            ["--cocodiff_slow_axes, COCODIFF_MEMORY_BUDGET: no effect in mode 'exact'"],
        ),
        (ENABLED | {"cocodiff_mode": "fast", "cocodiff_slow_axes": "flat", "cocodiff_memory_budget": "1"}, {}, []),
        (ENABLED, {"COCODIFF_RING": "outer"}, ["COCODIFF_RING: no effect without --ring_degree above 1"]),
        (
            {},
            {"COCODIFF_TOPLOGY": "4"},
            ["COCODIFF_TOPLOGY is not a variable of the plugin; the nearest is COCODIFF_TOPOLOGY"],
        ),
        (ENABLED, {"COCODIFF_TOPOLOGY": "2x2", "COCODIFF_A2A": "flat"}, []),
    ],
)
def test_warnings_name_options_without_effect(values: dict, environment: dict, expected: list[str]) -> None:
    assert warnings(values, environment) == expected
