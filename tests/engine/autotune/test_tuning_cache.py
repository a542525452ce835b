"""What was found of a machine, kept from one process to the next."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import ranks
from tests.engine.topology.test_planner import profile_of
from tests.quick import slow
from tests.xdit.attention.test_overlap import start
from xfuser_cocodiff.engine.attention.overlap_schedule import OverlapSchedule
from xfuser_cocodiff.engine.autotune import tuning_cache
from xfuser_cocodiff.engine.autotune.tuning_cache import TuningCache
from xfuser_cocodiff.engine.topology.topology import Topology

TOPOLOGY = Topology.parse("2x2", 4)


def some(folder: Path, **machine: str) -> TuningCache:
    known = profile_of([2, 2], [1e8, 1e6], latency=1e-3, launch=1e-6)
    machine = {"torch": "1", "degree": 4, **machine}
    return TuningCache(machine, known, {"exact auto A 1": OverlapSchedule(True, 4, flat=True)}, folder)


def test_what_is_kept_is_what_is_read(tmp_path: Path) -> None:
    kept = some(tmp_path)
    kept.save()
    found = tuning_cache.load(kept.file(tmp_path))
    assert found == replace(kept, folder=None)
    unknown = replace(kept, profile=None)
    assert TuningCache.from_json(json.loads(json.dumps(unknown.to_json()))) == replace(unknown, folder=None)
    assert [file.name for file in tmp_path.iterdir()] == [kept.file(tmp_path).name]


def test_another_machine_or_version_has_another_file(tmp_path: Path) -> None:
    assert some(tmp_path).file(tmp_path) != some(tmp_path, torch="2").file(tmp_path)
    assert some(tmp_path).file(tmp_path) != some(tmp_path, ranks="other").file(tmp_path)
    assert some(tmp_path).file(tmp_path) == some(tmp_path).file(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": 0}', '{"schema": 1, "profile": 3}'])
def test_a_file_that_is_something_else_is_not_there(tmp_path: Path, text: str) -> None:
    file = tmp_path / "file.json"
    assert tuning_cache.load(file) is None
    file.write_text(text)
    assert tuning_cache.load(file) is None


def share(rank: int, folders: list[str], versions: dict, hosts: str = "aabb") -> tuple[dict, bool]:
    from torch.distributed import group

    found = tuning_cache.load_shared(group.WORLD, versions, {"host": hosts[rank]}, Path(folders[rank]))
    if not found.schedules:
        found.schedules = {f"of rank {rank}": OverlapSchedule()}
        found.save()
    return found.schedules, found.folder is not None


def test_all_ranks_go_by_what_the_first_one_keeps(tmp_path: Path) -> None:
    """Folders of other hosts may hold something else."""
    folders = [str(tmp_path / str(rank // 2)) for rank in range(4)]
    assert [keeps for _, keeps in ranks.run(share, 4, folders, {"torch": "1"})] == [True, False, False, False]
    again = ranks.run(share, 4, folders, {"torch": "1"})
    assert [known for known, _ in again] == [{"of rank 0": OverlapSchedule()}] * 4
    assert not (tmp_path / "1").exists()
    other = TuningCache({"torch": "1", "ranks": [{"host": host} for host in "aabb"]})
    other.schedules, other.folder = {"of another host": OverlapSchedule(True, 2)}, tmp_path / "1"
    other.save()  # the other host's folder knows the same machine differently
    assert [known for known, _ in ranks.run(share, 4, folders, {"torch": "1"})] == [
        {"of rank 0": OverlapSchedule()}
    ] * 4
    assert ranks.run(share, 4, folders, {"torch": "2"})[1][0] == {"of rank 1": OverlapSchedule()}
    for hosts in ("aabc", "aaab"):  # the last rank, or another one, is on another host
        assert ranks.run(share, 4, folders, {"torch": "1"}, hosts)[1][0] == {"of rank 1": OverlapSchedule()}


def run_once(rank: int, folder: str, mode: str, topology: str) -> tuple[list[str], int, int]:
    """The schedules that a process finds, in how many steps, and how often it probes the links. The first rank alone
    keeps anything."""
    from unittest import mock

    from xfuser_cocodiff.engine.autotune import link_probe
    from xfuser_cocodiff.engine.settings.config import CocoDiffConfig
    from xfuser_cocodiff.xdit.launching import bare_runtime
    from xfuser_cocodiff.xdit.session import startup as starting

    group, _, step = start(rank, depth=6)
    expected, cache = step(), Path(folder) if rank == 0 else None
    slow = ("node",) if mode != "exact" else ()
    config = CocoDiffConfig(topology=Topology.parse(topology, 2), mode=mode, slow_axes=slow, cache=cache)
    with mock.patch.object(link_probe, "measure", side_effect=link_probe.measure) as probed:
        session = starting.create_session(group, config)
    bare_runtime.use_session(session)
    session.runs.begin(50)
    steps = 0
    while not (steps > 2 and session.schedule_tuner.settled):
        result = step()
        session.runs.end_step()
        steps += 1
    assert torch.equal(result, expected) or mode != "exact"
    return sorted(str(signature.candidates.chosen) for signature in session.layers.signatures), steps, probed.call_count


@pytest.mark.parametrize(("mode", "topology"), [slow("exact", "flat"), slow("exact", "2x1"), ("balanced", "2x1")])
def test_the_next_process_starts_with_what_was_found(tmp_path: Path, mode: str, topology: str) -> None:
    first = ranks.run(run_once, 2, str(tmp_path), mode, topology)
    assert first[0] == first[1] and first[0][1] > 8 and first[0][2] == 1
    [file] = tmp_path.iterdir()
    known = tuning_cache.load(file)
    assert known.profile and len(known.schedules) == 2
    changed = {name: schedule._replace(v_first=not schedule.v_first) for name, schedule in known.schedules.items()}
    known.schedules, known.folder = changed, tmp_path
    known.save()
    expected = sorted(map(str, changed.values())), 3, 0
    assert ranks.run(run_once, 2, str(tmp_path), mode, topology) == [expected] * 2
