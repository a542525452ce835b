"""The trial of schedules by whole steps, on a clock that only work moves."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests import ranks
from tests.engine.topology.test_planner import profile_of
from tests.xdit.attention.test_overlap import start, use_config
from xfuser_cocodiff.engine.attention.overlap_schedule import PLUGIN, STOCK, OverlapSchedule, ScheduleCandidates
from xfuser_cocodiff.engine.autotune.tuning_cache import TuningCache
from xfuser_cocodiff.engine.settings.config import CocoDiffConfig
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.session import schedule_trials
from xfuser_cocodiff.xdit.session import session as session_module
from xfuser_cocodiff.xdit.session.schedule_trials import TURNS, Trials

CPU = torch.device("cpu")
TOGETHER, AHEAD = OverlapSchedule(flat=True), OverlapSchedule(True)


class RunTracker:
    """The time, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> RunTracker:
    made = RunTracker()
    monkeypatch.setattr(schedule_trials, "time", made)
    return made


class Steps:
    """Steps of a session in which kinds of layers run, each by its schedule."""

    def __init__(self, clock: RunTracker, *kinds: ScheduleCandidates, stocks: float = 1.0, ours: float = 1.0) -> None:
        self._clock, self.kinds = clock, list(kinds)
        self.seconds = {TOGETHER: stocks, AHEAD: ours}
        self.found = 0
        self.asked: list[list[float]] = []
        """What ranks have agreed on."""
        self.trials = Trials(
            lambda: self.kinds, lambda own: self.asked.append(own) or own, lambda value: True, CPU, self._find
        )
        self.trials.begin_run()

    def _find(self) -> None:
        self.found += 1

    def run(
        self, *ran: ScheduleCandidates, calls: int = 2, usual: bool = True, beyond: float = 0.0
    ) -> list[OverlapSchedule]:
        """A step in which layers of some kinds run, and their schedules."""
        schedules = [kind.schedule for kind in ran]
        self._clock.now += beyond + sum(self.seconds[one] for one in schedules)
        for kind in ran:
            for _ in range(calls):
                kind.count_call(usual)
        self.trials.end_step()
        return schedules


@pytest.mark.parametrize(("stocks", "expected"), [(0.95, TOGETHER), (0.985, TOGETHER), (0.995, AHEAD), (1.05, AHEAD)])
def test_stock_s_way_is_taken_where_it_saves_more_than_a_hundredth(
    clock: RunTracker, stocks: float, expected: OverlapSchedule
) -> None:
    kinds = ScheduleCandidates([TOGETHER, AHEAD]), ScheduleCandidates([TOGETHER, AHEAD])
    steps = Steps(clock, *kinds, stocks=stocks)
    ran = [steps.run(*kinds) for _ in range(1 + len(TURNS))]
    by_turn = {PLUGIN: [AHEAD] * 2, STOCK: [TOGETHER] * 2}
    assert ran == [by_turn[PLUGIN], *(by_turn[turn] for turn in TURNS)]  # the first step of a run is not timed
    assert [kind.chosen for kind in kinds] == [expected] * 2
    assert steps.trials.settled and steps.found == 1 and len(steps.asked) == 1
    for _ in range(3):
        assert steps.run(*kinds) == [expected] * 2
    assert len(steps.asked) == 1


def test_one_disturbed_step_decides_nothing(clock: RunTracker) -> None:
    kind = ScheduleCandidates([TOGETHER, AHEAD])
    steps = Steps(clock, kind, stocks=1.1)
    for number in range(1 + len(TURNS)):
        steps.run(kind, beyond=5.0 * (number == 4))
    assert kind.chosen == AHEAD


def test_trials_go_on_from_run_to_run(clock: RunTracker) -> None:
    kind = ScheduleCandidates([TOGETHER, AHEAD])
    steps = Steps(clock, kind, stocks=0.5)
    for _ in range(len(TURNS) // 2):
        assert kind.chosen is None
        steps.trials.begin_run()
        clock.now += 7.0  # text is encoded
        for _ in range(4):  # a step that is not timed, a pair, and half of one
            steps.run(kind)
    assert kind.chosen == TOGETHER


def test_a_run_with_fewer_calls_in_each_step_is_compared_by_itself(clock: RunTracker) -> None:
    kind = ScheduleCandidates([TOGETHER, AHEAD])
    steps = Steps(clock, kind, stocks=0.5)
    for _ in range(6):
        steps.run(kind, calls=4)
    steps.trials.begin_run()
    steps.seconds = {TOGETHER: 1.0, AHEAD: 0.9}
    for _ in range(1 + len(TURNS)):
        assert kind.chosen is None
        steps.run(kind, calls=2)
    assert kind.chosen == AHEAD


def test_cached_steps_and_refreshes_do_not_count(clock: RunTracker) -> None:
    kinds = one, _ = ScheduleCandidates([TOGETHER, AHEAD]), ScheduleCandidates([TOGETHER, AHEAD])
    steps = Steps(clock, *kinds, stocks=0.5)
    steps.run(*kinds)
    for _ in TURNS:
        assert one.chosen is None
        turn = one.schedule
        steps.run(*kinds, usual=False, beyond=9.0)
        steps.run(*kinds, calls=1)
        steps.run(one)
        steps.run()
        assert steps.run(*kinds) == [turn] * 2
    assert [kind.chosen for kind in kinds] == [TOGETHER] * 2


def test_layers_that_come_up_later_have_a_trial_of_their_own(clock: RunTracker) -> None:
    first, second = ScheduleCandidates([TOGETHER, AHEAD]), ScheduleCandidates([TOGETHER, AHEAD])
    steps = Steps(clock, first, second, stocks=0.5)
    for _ in range(1 + len(TURNS)):
        steps.run(first)
    assert first.chosen == TOGETHER and second.chosen is None
    for _ in range(1 + len(TURNS)):
        steps.run(first, second)
    assert second.chosen == TOGETHER


def test_kinds_that_run_alone_in_cached_steps_do_not_keep_others_from_an_end(clock: RunTracker) -> None:
    kinds = cached, always = ScheduleCandidates([TOGETHER, AHEAD]), ScheduleCandidates([TOGETHER, AHEAD])
    steps = Steps(clock, *kinds, stocks=0.5)
    steps.run(always)
    for _ in range(1 + len(TURNS)):
        steps.run(cached, always)
        steps.run(always)
        steps.run(always)
    assert [kind.chosen for kind in kinds] == [TOGETHER] * 2 and len(steps.asked) == 1


def test_a_kind_that_ran_beside_a_chosen_one_is_tried_by_itself(clock: RunTracker) -> None:
    kinds = first, both, second = [ScheduleCandidates([TOGETHER, AHEAD]) for _ in range(3)]
    steps = Steps(clock, *kinds, stocks=0.5)
    steps.run(both, second)
    steps.trials.begin_run()
    for _ in range(1 + len(TURNS)):
        steps.run(first, both)
    assert both.chosen == TOGETHER and second.chosen is None
    for _ in range(1 + len(TURNS)):
        steps.run(both, second)
    assert second.chosen == TOGETHER


def test_layers_of_another_size_are_tried_where_no_run_is_declared(clock: RunTracker) -> None:
    kinds = small, large = ScheduleCandidates([TOGETHER, AHEAD]), ScheduleCandidates([TOGETHER, AHEAD])
    steps = Steps(clock, *kinds, stocks=0.5)
    for _ in range(3):
        steps.run(small)
    for _ in range(2 * len(TURNS) + 1):
        steps.run(large)
    assert [kind.chosen for kind in kinds] == [None, TOGETHER]


def test_kinds_that_take_turns_where_no_run_is_declared_are_all_tried(clock: RunTracker) -> None:
    kinds = first, second = ScheduleCandidates([TOGETHER, AHEAD]), ScheduleCandidates([TOGETHER, AHEAD])
    steps = Steps(clock, *kinds, stocks=0.5)
    for _ in range(2 * len(TURNS) + 2):
        steps.run(first)
        steps.run(second)
    assert [kind.chosen for kind in kinds] == [TOGETHER] * 2


def test_a_step_that_was_broken_off_does_not_count(clock: RunTracker) -> None:
    kind = ScheduleCandidates([TOGETHER, AHEAD])
    steps = Steps(clock, kind, stocks=0.5)
    for _ in range(5):
        steps.run(kind)
    kind.count_call()
    steps.trials.begin_run()
    for _ in range(5):
        steps.run(kind)
    assert kind.chosen == TOGETHER


def test_what_is_fixed_is_not_tried(clock: RunTracker) -> None:
    assert ScheduleCandidates([AHEAD]).chosen == ScheduleCandidates([AHEAD, AHEAD]).chosen == AHEAD
    steps = Steps(clock, ScheduleCandidates([AHEAD]))
    for _ in range(12):
        assert steps.run(*steps.kinds) == [AHEAD]
    assert steps.trials.settled and not steps.asked


def test_nothing_is_tried_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []
    session = session_module.Session()
    session.trials = SimpleNamespace(end_step=lambda: tries.append(1), begin_run=lambda: None)
    monkeypatch.setattr(session_module, "active", lambda: session)
    session.runs.begin(3)
    session.runs.end_step()
    monkeypatch.setattr(session_module, "is_captured", lambda: True)
    session.runs.end_step()
    assert tries == [1]
    monkeypatch.setattr(session_module, "is_captured", lambda: False)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    session.runs.end_step()
    assert tries == [1]


# On ranks.


def differing(rank: int, by_rank: list[dict[bool, float]]) -> tuple[list[str], list[float]]:
    """The schedules that are chosen where steps with V first, and without, take each rank so long; and its mean."""
    group, _, step = start(rank, depth=3)
    expected, clock = step(), RunTracker()
    links = profile_of([2], [1e3], latency=0.0, launch=0.0)  # V surely goes first
    session = use_config(group, CocoDiffConfig(topology=links.topology), TuningCache({}, links))
    session.runs.begin(20)
    with mock.patch.object(schedule_trials, "time", clock):
        for _ in range(2 + len(TURNS)):
            signatures = list(session.layers.signatures)
            v_first = any(signature.candidates.schedule.v_first for signature in signatures if signature.candidates)
            clock.now += by_rank[rank][v_first]
            assert torch.equal(step(), expected)
            session.runs.end_step()
    return [str(signature.candidates.chosen) for signature in signatures], session._mean([float(rank), 2.0 * rank])


@pytest.mark.parametrize(
    ("by_rank", "expected"),
    [
        ([{True: 1.0, False: 0.9}, {True: 1.0, False: 1.04}], "QKV together, 1 head group"),  # the mean saves 3 %
        ([{True: 1.0, False: 0.96}, {True: 1.0, False: 1.1}], "V first, 1 head group"),
    ],
)
def test_ranks_whose_steps_differ_choose_by_their_mean(by_rank: list[dict[bool, float]], expected: str) -> None:
    for chosen, mean in ranks.run(differing, 2, by_rank):
        assert all(one.startswith(expected) for one in chosen) and len(chosen) == 2
        assert mean == [0.5, 1.0]


def counted(rank: int) -> list[int]:
    """Steps that counted so far, after each step of a coded run of which every fourth is an exact refresh."""
    group, _, step = start(rank, depth=3)
    topology = Topology.named(node=2)
    config = CocoDiffConfig(
        topology=topology, mode="balanced", schedule="warmup=1,refresh=4", slow_axes=("node",), plan=Plan.flat(topology)
    )
    session = use_config(group, config)
    session.runs.begin(20)
    found = []
    for _ in range(9):
        step()
        session.runs.end_step()
        found.append(sum(map(len, session.trials._seconds.values())))
    return found


def test_exact_refreshes_of_a_coded_run_do_not_count() -> None:
    for found in ranks.run(counted, 2):
        # Layers are found in the first step and rehearsed in the second, and the fifth and the ninth are exact.
        assert found == [0, 0, 1, 2, 2, 3, 4, 5, 5]


def left_at_other_steps(rank: int, ended: int) -> tuple[list[bool], bool]:
    """Whether ranks have run each step by the same schedule, in a run after one whose last step ended on one rank only
    after so many; and whether a schedule was chosen at last."""
    group, _, step = start(rank, depth=3)
    links = profile_of([2], [1e3], latency=0.0, launch=0.0)
    session = use_config(group, CocoDiffConfig(topology=links.topology), TuningCache({}, links))
    session.runs.begin(20)
    for _ in range(ended):
        step()
        session.runs.end_step()
    step()
    if rank == 0:
        session.runs.end_step()
    session.runs.begin(20)
    same = []
    for _ in range(3 + len(TURNS)):
        same.append(
            session.all_agree(
                [str(signature.candidates.schedule) for signature in session.layers.signatures if signature.candidates]
            )
        )
        if not same[-1]:
            break
        step()
        session.runs.end_step()
    return same, all(signature.candidates.chosen for signature in session.layers.signatures)


@pytest.mark.parametrize("ended", [2, 4, 5])
def test_ranks_that_left_a_run_at_other_steps_take_the_same_turns_in_the_next(ended: int) -> None:
    assert ranks.run(left_at_other_steps, 2, ended) == [([True] * (3 + len(TURNS)), True)] * 2
