"""The cache of tuning results, from one process to the next."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests import ranks
from tests.engine.topology.test_planner import profile_of
from tests.xdit.attention.test_overlap import start
from xfuser_cocodiff.engine.attention.overlap_schedule import OverlapSchedule
from xfuser_cocodiff.engine.autotune import tuning_cache
from xfuser_cocodiff.engine.autotune.tuning_cache import TuningCache
from xfuser_cocodiff.engine.topology.topology import Topology


def cache_in(folder: Path, **machine: str) -> TuningCache:
    profile = profile_of([2, 2], [1e8, 1e6], latency=1e-3, launch=1e-6)
    machine = {"torch": "1", "degree": 4, **machine}
    return TuningCache(machine, profile, {"exact auto A 1": OverlapSchedule(True, 4, stock=True)}, folder)


def test_cache_is_read_as_written(tmp_path: Path) -> None:
    saved = cache_in(tmp_path)
    saved.save()
    loaded = tuning_cache.load(saved.file(tmp_path))
    assert loaded == replace(saved, folder=None)
    assert [file.name for file in tmp_path.iterdir()] == [saved.file(tmp_path).name]


def test_each_machine_and_version_has_its_own_file(tmp_path: Path) -> None:
    assert cache_in(tmp_path).file(tmp_path) != cache_in(tmp_path, torch="2").file(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 0}'])
def test_invalid_files_are_ignored(tmp_path: Path, text: str) -> None:
    file = tmp_path / "file.json"
    assert tuning_cache.load(file) is None
    file.write_text(text)
    assert tuning_cache.load(file) is None


def test_profile_of_another_topology_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    for topology, is_read in (("node=2,gpu=2", True), ("node=4", False)):
        file.write_text(json.dumps(cache_in(tmp_path, topology=topology).to_json()))
        assert (tuning_cache.load(file) is not None) == is_read


def share(rank: int, folders: list[str], versions: dict, hosts: str = "aabb") -> tuple[dict, bool]:
    from torch.distributed import group

    cache = tuning_cache.load_shared(group.WORLD, versions, {"host": hosts[rank]}, Path(folders[rank]))
    if not cache.schedules:
        cache.schedules = {f"of rank {rank}": OverlapSchedule()}
        cache.save()
    return cache.schedules, cache.folder is not None


def test_all_ranks_use_the_cache_of_rank_0(tmp_path: Path) -> None:
    """Folders of other hosts may differ."""
    folders = [str(tmp_path / str(rank // 2)) for rank in range(4)]
    assert [saves for _, saves in ranks.run(share, 4, folders, {"torch": "1"})] == [True, False, False, False]
    again = ranks.run(share, 4, folders, {"torch": "1"})
    assert [schedules for schedules, _ in again] == [{"of rank 0": OverlapSchedule()}] * 4
    assert not (tmp_path / "1").exists()
    assert ranks.run(share, 4, folders, {"torch": "2"})[1][0] == {"of rank 1": OverlapSchedule()}
    # Another rank is on another host.
    assert ranks.run(share, 4, folders, {"torch": "1"}, "aaab")[1][0] == {"of rank 1": OverlapSchedule()}


def run_once(rank: int, folder: str) -> tuple[list[str], int, int]:
    """Return the schedules that a process chooses, in how many steps, and how often it probes the links. Only rank 0
    saves its cache."""
    from unittest import mock

    from benchmarks import bare_runtime
    from xfuser_cocodiff.engine.autotune import link_probe
    from xfuser_cocodiff.xdit.session import startup as starting
    from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig

    group, _, step = start(rank, depth=6)
    cache = Path(folder) if rank == 0 else None
    topology = Topology.parse("2x1", 2)
    config = CocoDiffConfig(topology=topology, mode="balanced", slow_axes=("node",), cache=cache)
    with mock.patch.object(link_probe, "Probe", side_effect=link_probe.Probe) as probed:
        session = starting.create_session(group, config)
    bare_runtime.use_session(session)
    session.begin_run(50)
    steps = 0
    while not (steps > 2 and session.is_tuned):
        step()
        session.end_step()
        steps += 1
    return sorted(str(signature.candidates.chosen) for signature in session.layers.signatures), steps, probed.call_count


def test_next_process_uses_the_saved_results(tmp_path: Path) -> None:
    first = ranks.run(run_once, 2, str(tmp_path))
    assert first[0] == first[1] and first[0][1] > 8 and first[0][2] == 1
    [file] = tmp_path.iterdir()
    cache = tuning_cache.load(file)
    assert cache.profile and len(cache.schedules) == 2
    changed = {name: schedule._replace(v_first=not schedule.v_first) for name, schedule in cache.schedules.items()}
    cache.schedules, cache.folder = changed, tmp_path
    cache.save()
    expected = sorted(map(str, changed.values())), 3, 0
    assert ranks.run(run_once, 2, str(tmp_path)) == [expected] * 2
