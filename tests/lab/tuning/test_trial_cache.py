"""The file of trials, without running any."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from xfuser_cocodiff.lab.tuning.trial_cache import BitTrial, TrialCache


@pytest.mark.parametrize(("changed", "cached"), [({}, 1), ({"steps": 8}, 0), ({"model": "SD3.5"}, 0)])
def test_trials_of_other_settings_are_not_resumed(changed: dict, cached: int, tmp_path: Path) -> None:
    key = {"model": "FLUX.1-dev", "steps": 4, "dtype": "float32", "prompts": ("a",)}

    def open_cache(key: dict) -> TrialCache:
        return TrialCache(SimpleNamespace(), (["a"], ["b"]), tmp_path / "out.part", key, lambda name: None)

    trial = BitTrial((40.0,), 0.9, None, (1.0, 0.5, 0.25))
    open_cache(key)._write("balanced", trial, ["blocks.0"])
    again = open_cache(key | changed)
    assert (again.num_cached, again.layers) == (cached, ["blocks.0"] * cached)
    if cached:
        assert again.run_mode("balanced") == trial
    assert json.loads((tmp_path / "out.part").read_text())["of"]["steps"] == 4


def test_bytes_of_later_steps_leave_out_the_keyframe() -> None:
    trial = BitTrial((40.0, 30.0), 0.9, None, (1.0, 0.5, 0.25))
    assert (trial.bytes_fraction, trial.later_bytes_fraction) == (1.75 / 3, 0.375)
    assert trial.error == pytest.approx(10**-3.5)
