"""Checks of measured times: each one alone makes a time invalid, and names the reason."""

from dataclasses import replace

import pytest

from xfuser_cocodiff.lab.cluster_bench.validity import Evidence

SOUND = Evidence(1.02, 0.5, {"node": 1.01, "gpu": 0.99}, 0.93, 0.005)


def test_a_sound_time_is_valid() -> None:
    assert SOUND.objections() == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dilation_ratio": 0.96}, "time at 2 D differs by -4.0% from that at D"),
        ({"idle_share": 0.29}, "a core was idle 29% of the time, less than 30%"),
        ({"bytes_ratio": {"node": 1.03, "gpu": 1.0}}, "bytes counted on axis node differ by +3.0%"),
        ({"bytes_ratio": {"node": 1.0, "gpu": 0.0}}, "bytes counted on axis gpu differ by -100.0%"),
        ({"prediction_ratio": 1.12}, "prediction is off by +12.0%"),
        ({"late_share": 0.02}, "a collective started late by 2.0% of the step"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_each_check_names_its_reason(changes: dict, reason: str) -> None:
    [objection] = replace(SOUND, **changes).objections()
    assert objection.startswith(reason)


def test_all_reasons_are_given() -> None:
    assert len(Evidence(1.5, 0.0, {"node": 2.0, "gpu": 2.0}, 2.0, 0.5).objections()) == 6
