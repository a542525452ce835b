"""What was found of a machine, kept from one process to the next."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import ranks
from tests.machine.test_planner import profile_of
from tests.quick import slow
from tests.xdit.attention.test_overlap import odd_by_heads, start
from xfuser_cocodiff.attention.schedule import Schedule
from xfuser_cocodiff.machine.plan import Plan
from xfuser_cocodiff.machine.profile import AxisLink
from xfuser_cocodiff.machine.topology import Topology
from xfuser_cocodiff.measuring import findings
from xfuser_cocodiff.measuring.findings import Findings

TOPOLOGY = Topology.parse("2x2", 4)
PART = Topology.named(node=2)


def some(folder: Path, **machine: str) -> Findings:
    samples = {"gpu": (1e-3, 2**15, 2e-3), "copy": 1e9}
    plans = {
        str(TOPOLOGY): {1024: Plan.parse("hierarchical:gpu,node*/2", TOPOLOGY), 4096: Plan.flat(TOPOLOGY)},
        str(PART): {64: Plan.flat(PART)},
    }
    known = profile_of([2, 2], [1e8, 1e6], latency=1e-3, launch=1e-6)
    machine = {"torch": "1", "degree": 4, **machine}
    return Findings(machine, known, samples, plans, {"exact auto A 1": Schedule(True, 4)}, folder)


def test_what_is_kept_is_what_is_read(tmp_path: Path) -> None:
    kept = some(tmp_path)
    kept.keep()
    found = findings.read(kept.file(tmp_path))
    assert (found.machine, found.profile, found.plans) == (kept.machine, kept.profile, kept.plans)
    assert (found.schedules, found.samples) == (kept.schedules, {})
    partial = replace(kept, profile=None)  # the probe is not complete
    assert Findings.from_json(json.loads(json.dumps(partial.to_json()))) == replace(partial, folder=None)
    assert [file.name for file in tmp_path.iterdir()] == [kept.file(tmp_path).name]
    link = AxisLink("flat", 1e-3, 1e8)
    alike = replace(kept.profile, topology=Topology.flat(4), links=(link,))
    flat = Findings({"degree": 4}, alike, {}, {"flat": {64: Plan.parse("flat*", Topology.flat(4))}})
    assert Findings.from_json(json.loads(json.dumps(flat.to_json()))).plans == flat.plans


def test_another_machine_or_version_has_another_file(tmp_path: Path) -> None:
    assert some(tmp_path).file(tmp_path) != some(tmp_path, torch="2").file(tmp_path)
    assert some(tmp_path).file(tmp_path) != some(tmp_path, ranks="other").file(tmp_path)
    assert some(tmp_path).file(tmp_path) == some(tmp_path).file(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"schema": 0}', '{"schema": 1, "profile": 3}'])
def test_a_file_that_is_something_else_is_not_there(tmp_path: Path, text: str) -> None:
    file = tmp_path / "file.json"
    assert findings.read(file) is None
    file.write_text(text)
    assert findings.read(file) is None


def share(rank: int, folders: list[str], versions: dict) -> tuple[dict, bool]:
    from torch.distributed import group

    found = findings.shared(group.WORLD, versions, {"host": f"host {rank // 2}"}, Path(folders[rank]))
    if not found.schedules:
        found.schedules = {f"of rank {rank}": Schedule()}
        found.keep()
    return found.schedules, found.folder is not None


def test_all_ranks_go_by_what_the_first_one_keeps(tmp_path: Path) -> None:
    """Folders of other hosts may hold something else."""
    folders = [str(tmp_path / str(rank // 2)) for rank in range(4)]
    assert [keeps for _, keeps in ranks.run(share, 4, folders, {"torch": "1"})] == [True, False, False, False]
    again = ranks.run(share, 4, folders, {"torch": "1"})
    assert [known for known, _ in again] == [{"of rank 0": Schedule()}] * 4
    assert not (tmp_path / "1").exists()
    other = Findings({"torch": "1", "ranks": [{"host": f"host {rank // 2}"} for rank in range(4)]})
    other.schedules, other.folder = {"of another host": Schedule(True, 2)}, tmp_path / "1"
    other.keep()  # the other host's folder knows the same machine differently
    assert [known for known, _ in ranks.run(share, 4, folders, {"torch": "1"})] == [{"of rank 0": Schedule()}] * 4
    assert ranks.run(share, 4, folders, {"torch": "2"})[1][0] == {"of rank 1": Schedule()}


def run_once(
    rank: int, folder: str, mode: str, topology: str = "2x1", odd: bool = False
) -> tuple[list[str], list[int]]:
    """What a process finds, step by step, and in how many trials of plans and pieces of a probe; if `odd`, with an
    attention whose bits depend on how many heads it is given. Only the first rank keeps anything."""
    from unittest import mock

    from xfuser_cocodiff.measuring import probe
    from xfuser_cocodiff.settings.config import CocoDiffConfig
    from xfuser_cocodiff.xdit.engine import start as starting
    from xfuser_cocodiff.xdit.engine import trials
    from xfuser_cocodiff.xdit.launching import world

    group, _, step = start(rank, depth=6)
    if odd:
        from xfuser.model_executor.layers import usp

        usp._get_attention_function = odd_by_heads(usp._get_attention_function)
    expected, cache = step(), Path(folder) if rank == 0 else None
    slow = ("node",) if mode != "exact" else ()
    config = CocoDiffConfig(topology=Topology.parse(topology, 2), mode=mode, slow_axes=slow, cache=cache)
    tried, probed = [], []
    with (
        mock.patch.object(trials, "tried", lambda *given: tried.append(given[2]) or Plan.flat(config.topology)),
        mock.patch.object(probe.Probe, "go_on", lambda self, real=probe.Probe.go_on: probed.append(1) or real(self)),
    ):
        engine = starting.engine_over(group, config, at_once=False)
        assert not probed  # not before a run has time for it
        world.use(engine)
        engine.trials.allowance.share = 100.0
        engine.runs.begin(200)
        for _ in range(200):
            result = step()
            engine.runs.end_step()
            if engine.trials.settled:
                break
    assert engine.trials.settled
    assert torch.equal(result, expected) or mode != "exact"
    return sorted(str(kind.trial.chosen) for kind in engine.layers.kinds), [len(tried), len(probed)]


@pytest.mark.parametrize(("mode", "topology"), [slow("exact", "flat"), slow("exact", "2x1"), ("balanced", "2x1")])
def test_the_next_process_starts_with_what_was_found(tmp_path: Path, mode: str, topology: str) -> None:
    first = ranks.run(run_once, 2, str(tmp_path), mode, topology)
    assert first[0] == first[1]
    assert first[0][1][0] > 0 and first[0][1][1] > 3
    [file] = tmp_path.iterdir()
    known = findings.read(file)
    assert known.profile and known.schedules and any(known.plans.values())
    second = ranks.run(run_once, 2, str(tmp_path), mode, topology)
    assert [schedules for schedules, _ in second] == [schedules for schedules, _ in first]
    assert [counts for _, counts in second] == [[0, 0]] * 2


def test_groups_of_heads_that_were_kept_are_compared_again(tmp_path: Path) -> None:
    """They may have been found with another kind of attention."""
    ranks.run(run_once, 2, str(tmp_path), "exact")
    [file] = tmp_path.iterdir()
    known = findings.read(file)
    known.schedules, known.folder = dict.fromkeys(known.schedules, Schedule(True, 2)), tmp_path
    known.keep()
    for schedules, _ in ranks.run(run_once, 2, str(tmp_path), "exact"):
        assert set(schedules) == {"V first, 2 head groups"}
    known.keep()
    for schedules, _ in ranks.run(run_once, 2, str(tmp_path), "exact", "2x1", True):
        assert all("1 head group" in schedule for schedule in schedules)  # and run_once has compared the bits
