"""Bit allocations by layer, tensor and phase, and their schedule files."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tests import ranks
from tests.engine.compression.test_runtime import SIZES, runtime
from xfuser_cocodiff.engine.compression import bit_allocation
from xfuser_cocodiff.engine.compression.bit_allocation import LETTERS, NOT_SENT, BitAllocation
from xfuser_cocodiff.engine.compression.link_reference import ADAPTIVE
from xfuser_cocodiff.engine.compression.modes import CodecSchedule
from xfuser_cocodiff.engine.settings.config import resolve
from xfuser_cocodiff.engine.settings.ring_placement import SequenceRanks
from xfuser_cocodiff.engine.topology.topology import Topology

STARTS = (0.0, 0.5)
BITS = {"q": (2, NOT_SENT), "k": (4, None), "v": (1.6, 2.7), "o": (8, 2)}
OTHER_BITS = {letter: (2, 2) for letter in LETTERS}
BOTH = BitAllocation(
    STARTS, {"blocks.0": BITS, "blocks.1": OTHER_BITS, "blocks.2": OTHER_BITS}, 8, ADAPTIVE, 11, "FLUX.1-dev"
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "tuned.json"
    file.write_text(json.dumps(BOTH.to_json()))
    return file


def test_files_are_read_as_written(file: Path) -> None:
    found = bit_allocation.read(f"@{file}")
    assert found.to_json() == BOTH.to_json()
    entries = json.loads(file.read_text())["schedule"]
    assert [(one["steps"], one["codec"]) for one in entries if (one["layer"], one["tensor"]) == ("blocks.0", "k")] == [
        *(([0, 4], "bits=4"), ([5, 10], "exact"))
    ]
    assert (found.layers["blocks.0"]["k"], found.first, found.predictor) == ((4, None), 8, "auto")


def test_layers_have_their_bits_in_each_phase(file: Path) -> None:
    one = runtime(overrides=f"@{file}")
    one.begin_run(11)
    seen = {}
    for step in range(11):
        for layer in BOTH.layers:
            seen[layer, step] = one.layer_codecs(layer, layer, 0, SIZES).codecs
        one.end_step()
    assert all(codec.is_keyframe and codec.bits == 8 for layer in BOTH.layers for codec in seen[layer, 0].values())
    for step in range(1, 11):
        phase = int(step >= 5)  # of 10 steps after the first
        assert {letter: seen["blocks.0", step][letter].bits for letter in LETTERS} == {
            letter: bits[phase] or None for letter, bits in BITS.items()
        }
        assert all(codec.bits == 2 and codec.sends_gain for codec in seen["blocks.1", step].values())
    assert seen["blocks.0", 7]["k"].is_exact and not seen["blocks.0", 7]["v"].is_exact
    assert [step for step in range(11) if seen["blocks.0", step]["q"].sends_nothing] == [5, 6, 7, 8, 9, 10]


def test_overrides_may_follow_a_file(file: Path) -> None:
    changed = CodecSchedule.parse(f"@{file},refresh=3,predictor=0.5", CodecSchedule())
    assert changed.is_keyframe_step(3) and changed.codecs(1, 10, "blocks.0")["k"].predictor == 0.5
    # Without a layer, as in plans, the codecs are those that most layers have.
    assert {letter: codec.bits for letter, codec in changed.codecs(1, 10).items()} == dict.fromkeys(LETTERS, 2)


def test_a_file_leaves_branches_coded_together(file: Path) -> None:
    """The weight of the leading branch is the mode's, unless the file has one or one follows it."""
    base = CodecSchedule(joint=1.25)
    weights = [CodecSchedule.parse(text, base).joint for text in (f"@{file}", f"@{file},joint=0")]
    assert weights == [1.25, 0.0]
    file.write_text(json.dumps(replace(BOTH, joint=0.5).to_json()))
    weights = [CodecSchedule.parse(text, base).joint for text in (f"@{file}", f"@{file},joint=0")]
    assert weights == [0.5, 0.0]
    file.write_text(json.dumps(BOTH.to_json() | {"joint": 3}))
    with pytest.raises(ValueError, match="joint 3; it must be a weight from 0 to 2, or null"):
        bit_allocation.read(f"@{file}")
    earlier = BOTH.to_json()
    del earlier["joint"]
    file.write_text(json.dumps(earlier))
    assert bit_allocation.read(f"@{file}").joint is None


@pytest.mark.parametrize("override", ["bits=4", "bits_q=1", "cached=0.5", "score=change"])
def test_overrides_of_values_in_the_file_are_refused(file: Path, override: str) -> None:
    with pytest.raises(ValueError, match="has no effect with a file; valid are warmup, first"):
        CodecSchedule.parse(f"@{file},refresh=3,{override}", CodecSchedule())


def test_unknown_layers_are_refused(file: Path) -> None:
    one = runtime(overrides=f"@{file}")
    one.begin_run(5)
    with pytest.raises(ValueError, match=r"no bits for the layer 'single\.7'.*FLUX\.1-dev.*'blocks\.0'.*cocodiff tune"):
        one.layer_codecs("single.7", 1, 0, SIZES)


VALUES = {"use_cocodiff": True, "cocodiff_topology": "2x2"}


def test_the_flag_has_a_checksum_and_checks_the_model(file: Path) -> None:
    def schedule(model: str | None = "black-forest-labs/FLUX.1-dev") -> tuple[str, str]:
        config = resolve(
            {**VALUES, "cocodiff_schedule": f"@{file}", "model": model}, {}, SequenceRanks(4, Topology.flat(4))
        )
        return config.mode, config.schedule

    mode, first = schedule()
    assert mode == "balanced" and first.startswith(f"@{file}#") and schedule(None) == (mode, first)
    file.write_text(file.read_text() + "\n")
    assert schedule()[1] != first
    with pytest.raises(
        ValueError, match=r"--cocodiff_schedule: the schedule .* tuned to 'FLUX.1-dev'.*'/models/Wan2.1'"
    ):
        schedule("/models/Wan2.1")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "No such file"),
        ("nonsense", "Expecting value"),
        ({"format": "else"}, "format 'else' instead of"),
        ({"layers": [], "schedule": []}, "0 layers"),
        ({"schedule": BOTH.to_json()["schedule"][1:]}, "bits for all 2 phases"),
        ({"layers": ["blocks.0", "blocks.1"]}, "'blocks.2'"),
        ({"first": "bits=3"}, "unknown codec 'bits=3'"),
        ({"starts": [0.5, 0.0]}, "phases start at"),
        ([], "TypeError"),
    ],
    ids=str,
)
def test_invalid_files_are_refused_with_the_flag(tmp_path: Path, change: object, message: str) -> None:
    file = tmp_path / "other.json"
    if isinstance(change, dict):
        file.write_text(json.dumps({**BOTH.to_json(), **change}))
    elif change is not None:
        file.write_text(change if isinstance(change, str) else json.dumps(change))
    with pytest.raises(ValueError, match="valid is @FILE, written by cocodiff tune") as caught:
        resolve({**VALUES, "cocodiff_schedule": f"@{file}"}, {}, SequenceRanks(4, Topology.flat(4)))
    assert "--cocodiff_schedule" in str(caught.value) and message in str(caught.value)


def read_own(rank: int, folder: str) -> None:
    from xfuser import xFuserArgs

    own = Path(folder, str(rank))
    own.mkdir()
    own.joinpath("tuned.json").write_text(json.dumps({**BOTH.to_json(), "model": None, "predictor": [0.5, 0.25][rank]}))
    os.chdir(own)
    given = {"use_cocodiff": True, "cocodiff_topology": "2x1", "cocodiff_schedule": "@tuned.json"}
    xFuserArgs(model="tiny", ulysses_degree=2, **given).create_config()


def test_ranks_that_read_different_files_all_fail(tmp_path: Path) -> None:
    """Fail as on nodes with separate file systems."""
    for error in ranks.outcomes(read_own, 2, str(tmp_path)):
        assert "CoCoDiff's options differ between ranks: --cocodiff_schedule: rank 0: " in str(error)
