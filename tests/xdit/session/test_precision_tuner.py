"""Choice of precisions by whole steps, on a mock clock, and on ranks whose step times depend on what they send."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests import ranks
from tests.engine.compression.test_runtime import partition_on
from tests.engine.topology.test_planner import profile_of
from tests.xdit.attention.test_overlap import start, use_config
from tests.xdit.session.test_schedule_tuner import CPU, FakeClock
from xfuser_cocodiff.engine.autotune import tuning_cache
from xfuser_cocodiff.engine.compression.precisions import (
    LOSSLESS,
    SCHEDULED,
    KindLoad,
    LayerKind,
    PrecisionChoice,
    StepLoad,
)
from xfuser_cocodiff.engine.compression.reference_memory import LayerSizes
from xfuser_cocodiff.engine.compression.runtime import CodecRuntime
from xfuser_cocodiff.engine.settings.config import CocoDiffConfig, Overlap
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.session import step_tuner
from xfuser_cocodiff.xdit.session.precision_tuner import PrecisionTuner
from xfuser_cocodiff.xdit.session.session import Session

SIZES = LayerSizes(4 * 64 * 64, 64 * 64, 64, 2)
EXACT_BYTES = 1_000_000
LADDER = (SCHEDULED, 4.0, 8.0, LOSSLESS)
SHARES = {SCHEDULED: 0.13, 4.0: 0.265625, 8.0: 0.515625, LOSSLESS: 1.0}
"""Bytes over lossless ones at 64 values with a byte of scale."""
T0_STEPS, TRIAL_STEPS = 4, 8
"""Steps that measure the lowest precision alone, and in turns with another one."""


def kind_of(name: str) -> LayerKind:
    return LayerKind(name, SIZES, False, "bits=2", LADDER)


DOUBLE, SINGLE = kind_of("transformer_blocks.*.attn"), kind_of("single_transformer_blocks.*.attn")
CALLS = {DOUBLE: 2, SINGLE: 5}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    made = FakeClock()
    monkeypatch.setattr(step_tuner, "time", made)
    return made


class Steps:
    """Steps of a model that computes for a second, while its links are busy for a time that depends on precisions.

    Args:
        clock: mock clock.
        rate: bytes per second of the links.
        hidden: seconds of communication that computation hides.
        knows_links: whether the rate of the links is known.
        cached: choice that the tuning cache has of each kind.
        kinds: kinds of layers.
    """

    def __init__(
        self,
        clock: FakeClock,
        rate: float,
        hidden: float = 1.0,
        knows_links: bool = True,
        cached: PrecisionChoice | None = None,
        kinds: tuple[LayerKind, ...] = (DOUBLE, SINGLE),
    ) -> None:
        self._clock, self._rate, self._hidden, self.kinds = clock, rate, hidden, kinds
        self.messages: list[str | None] = []
        self.tuner = PrecisionTuner(
            lambda kind, size: size / rate if knows_links else None,
            list,
            lambda value: True,
            CPU,
            lambda kind: cached,
            self.messages.append,
        )
        self.tuner.begin_run()

    @property
    def precisions(self) -> tuple[float, ...]:
        return tuple(map(self.tuner.precision_of, self.kinds))

    @property
    def is_decided(self) -> bool:
        return bool(self.tuner.choices) and self.tuner.settled

    def seconds(self, precisions: tuple[float, ...]) -> float:
        """Return the step time at some precisions."""
        sent = sum(CALLS[kind] * EXACT_BYTES * SHARES[each] for kind, each in zip(self.kinds, precisions, strict=True))
        return 1.0 + max(0.0, sent / self._rate - self._hidden)

    def run(self, was_keyframe: bool = False, is_usual: bool = True, delay: float = 0.0) -> tuple[float, ...]:
        """Run a step, and return its precisions."""
        ran = self.precisions
        self._clock.now += self.seconds(ran) + delay
        loads = {
            kind: KindLoad(CALLS[kind], round(CALLS[kind] * EXACT_BYTES * SHARES[each]), CALLS[kind] * EXACT_BYTES)
            for kind, each in zip(self.kinds, ran, strict=True)
        }
        self.tuner.end_tuned_step(StepLoad(loads, not was_keyframe), is_usual)
        return ran

    def decide(self, limit: int = 100) -> list[tuple[float, ...]]:
        """Run steps until all precisions are chosen, and return those of each step."""
        ran = [self.run(was_keyframe=True)]
        while not self.is_decided:
            assert len(ran) < limit
            ran.append(self.run())
        return ran


def best_by_hand(steps: Steps) -> list[tuple[float, ...]]:
    """Return all precisions whose step time is at most 3 % above that of the fewest bits."""
    fewest = steps.seconds((SCHEDULED,) * len(steps.kinds))
    return [(one, two) for one in LADDER for two in LADDER if steps.seconds((one, two)) <= 1.03 * fewest]


ALL_EXACT_SECONDS = 7 * EXACT_BYTES


@pytest.mark.parametrize("knows_links", [True, False])
@pytest.mark.parametrize("lossless_seconds", [0.01, 0.9, 1.2, 1.9, 2.5, 3.9, 5.0, 9.0])
def test_no_kind_can_be_raised_further(clock: FakeClock, lossless_seconds: float, knows_links: bool) -> None:
    steps = Steps(clock, ALL_EXACT_SECONDS / lossless_seconds, knows_links=knows_links)
    steps.decide()
    chosen, allowed = steps.precisions, best_by_hand(steps)
    assert chosen in allowed
    for index in range(2):
        higher = LADDER[min(3, LADDER.index(chosen[index]) + 1)]
        raised = (*chosen[:index], higher, *chosen[index + 1 :])
        assert raised == chosen or raised not in allowed


def test_faster_links_never_get_fewer_bits(clock: FakeClock) -> None:
    chosen = []
    for lossless_seconds in (9.0, 5.0, 3.5, 2.4, 1.9, 1.2, 0.5):
        steps = Steps(clock, ALL_EXACT_SECONDS / lossless_seconds)
        steps.decide()
        chosen.append(sum(CALLS[kind] * SHARES[each] for kind, each in zip(steps.kinds, steps.precisions, strict=True)))
    assert chosen == sorted(chosen) and chosen[0] < chosen[-1]
    assert chosen[-1] == 7


def test_precisions_whose_links_alone_take_too_long_are_not_tried(clock: FakeClock) -> None:
    steps = Steps(clock, ALL_EXACT_SECONDS / 9.0, hidden=0.0)  # 4 bits take 2.4 s, and the fewest ones 2.2 with compute
    steps.decide()
    assert steps.precisions == (SCHEDULED, SCHEDULED)
    slow = Steps(clock, ALL_EXACT_SECONDS / 90.0, hidden=0.0)
    assert {*slow.decide()} == {(SCHEDULED, SCHEDULED)} and slow.precisions == (SCHEDULED, SCHEDULED)


def test_precisions_that_cost_nothing_even_if_exposed_are_accepted_at_once(clock: FakeClock) -> None:
    steps = Steps(clock, ALL_EXACT_SECONDS / 0.02, hidden=0.0)
    assert steps.decide() == [(SCHEDULED, SCHEDULED)] * (1 + T0_STEPS)
    assert steps.precisions == (LOSSLESS, LOSSLESS)
    [message] = steps.messages
    assert message.startswith(
        "mode 'auto': transformer_blocks.*.attn lossless, single_transformer_blocks.*.attn lossless; step at most 1.0"
    )


def test_others_are_tried_in_turns_with_the_fewest_bits(clock: FakeClock) -> None:
    steps = Steps(clock, ALL_EXACT_SECONDS / 1.5, kinds=(DOUBLE,))
    ran = [each for [each] in steps.decide()]
    base, four = SCHEDULED, 4.0
    in_turns = [base, four, four, base, base, four, four, base]
    assert ran[1 + T0_STEPS :][:TRIAL_STEPS] == in_turns
    assert {*ran} == {SCHEDULED, *LADDER[1:]} and ran[-1] in (SCHEDULED, LOSSLESS)
    assert steps.precisions == (LOSSLESS,)


@pytest.mark.parametrize(("extra", "expected"), [(0.029, 4.0), (0.031, SCHEDULED)])
def test_three_percent_of_a_step_may_be_added(clock: FakeClock, extra: float, expected: float) -> None:
    steps = Steps(clock, 1e9, kinds=(DOUBLE,), knows_links=False)
    steps.seconds = lambda precisions: {SCHEDULED: 1.0, 4.0: 1 + extra}.get(precisions[0], 2.0)  # type: ignore[method-assign]
    steps.decide()
    assert steps.precisions == (expected,)
    assert ("2.9 % above" in steps.messages[-1]) == (expected == 4.0)


def seconds_with(added: tuple[dict[float, float], ...], precisions: tuple[float, ...]) -> float:
    """Return the time of a step of a second, to which the precision of each kind that runs adds; others add one."""
    return 1 + sum(of_kind.get(each, 1.0) for of_kind, each in zip(added, precisions, strict=False))


@pytest.mark.parametrize(("extra", "expected"), [(0.029, SCHEDULED), (0.0003, 4.0)])
def test_kinds_found_later_share_the_three_percent(clock: FakeClock, extra: float, expected: float) -> None:
    steps = Steps(clock, 1e9, kinds=(DOUBLE,), knows_links=False)
    added = ({SCHEDULED: 0.0, 4.0: 0.029}, {SCHEDULED: 0.0, 4.0: extra})
    steps.seconds = lambda precisions: seconds_with(added, precisions)  # type: ignore[method-assign]
    steps.decide()
    assert steps.precisions == (4.0,)
    steps.kinds = (DOUBLE, SINGLE)
    for _ in range(60):
        steps.run()
    assert steps.tuner.settled and steps.precisions == (4.0, expected)
    assert ("; step 1.03 s, 2.9 % above" in steps.messages[-1]) == (expected == 4.0)


@pytest.mark.parametrize(("extra", "expected"), [(0.029, SCHEDULED), (0.0, 4.0)])
def test_cached_final_precisions_may_have_used_up_the_three_percent(
    clock: FakeClock, extra: float, expected: float
) -> None:
    steps = Steps(clock, 1e9, knows_links=False)
    steps.tuner._cached = lambda kind: PrecisionChoice(4.0, True) if kind == DOUBLE else None
    added = ({4.0: 0.0}, {SCHEDULED: 0.0, 4.0: extra})
    steps.seconds = lambda precisions: seconds_with(added, precisions)  # type: ignore[method-assign]
    for _ in range(60):
        steps.run()
    assert steps.tuner.settled and steps.precisions == (4.0, expected)


def test_kinds_of_one_name_are_all_described(clock: FakeClock) -> None:
    kinds = (DOUBLE, DOUBLE._replace(sizes=SIZES._replace(num_values=64)), DOUBLE._replace(schedule="bits=3"), SINGLE)
    tuner = Steps(clock, 1.0, cached=PrecisionChoice(8.0, True)).tuner
    tuner.end_tuned_step(StepLoad({kind: KindLoad(1, 1, 10) for kind in kinds}, True), is_usual=True)
    assert [*tuner.described.values()] == ["8 bits"] * 4 and SINGLE.name in tuner.described


def test_cached_precisions_belong_to_a_model_eager_or_compiled() -> None:
    cache = tuning_cache.TuningCache({})
    session = Session(CocoDiffConfig(topology=Topology.named(node=2), mode="auto"), model="FluxTransformer2DModel")
    session.comm_setup = SimpleNamespace(cache=cache)
    cache.precisions[session._precision_key(DOUBLE)] = PrecisionChoice(8.0, True)
    assert session._cached_precision(DOUBLE) == (8.0, True)
    session.is_compiled = True
    assert session._cached_precision(DOUBLE) is None
    session.is_compiled, session.model = False, "SD3Transformer2DModel"
    assert session._cached_precision(DOUBLE) is None


def test_one_slow_step_does_not_change_the_choice(clock: FakeClock) -> None:
    steps = Steps(clock, ALL_EXACT_SECONDS / 0.9, knows_links=False)
    steps.run(was_keyframe=True)
    number = 0
    while not steps.is_decided:
        steps.run(delay=5.0 * (number % TRIAL_STEPS == 6))
        number += 1
    assert steps.precisions == (LOSSLESS, LOSSLESS)


def test_keyframes_and_steps_with_undecided_schedules_are_not_timed(clock: FakeClock) -> None:
    steps = Steps(clock, ALL_EXACT_SECONDS / 0.9)
    for _ in range(20):
        assert steps.run(is_usual=False) == (SCHEDULED, SCHEDULED)
    while not steps.is_decided:
        steps.run(was_keyframe=True, delay=9.0)
        steps.run()
    assert steps.precisions == (LOSSLESS, LOSSLESS)


def test_short_runs_continue_with_the_rounds_of_the_last_one(clock: FakeClock) -> None:
    steps = Steps(clock, ALL_EXACT_SECONDS / 0.9)
    num_runs = 0
    while not steps.is_decided:
        num_runs += 1
        steps.tuner.begin_run()
        clock.now += 7.0  # time between runs
        assert steps.run(was_keyframe=True) == (SCHEDULED, SCHEDULED)
        for _ in range(3):
            if not steps.is_decided:
                steps.run()
    assert steps.precisions == (LOSSLESS, LOSSLESS) and num_runs > 3


def test_a_final_choice_of_the_cache_is_used_at_once_and_others_continue(clock: FakeClock) -> None:
    final = Steps(clock, 1.0, cached=PrecisionChoice(8.0, True))
    assert [final.run() for _ in range(5)] == [(8.0, 8.0)] * 5 and not final.messages
    steps = Steps(clock, ALL_EXACT_SECONDS / 0.9, cached=PrecisionChoice(8.0, False))
    ran = steps.decide()
    assert {*ran} <= {(SCHEDULED,) * 2, (LOSSLESS,) * 2}  # 4 and 8 bits are not tried again
    assert steps.precisions == (LOSSLESS, LOSSLESS)
    assert steps.tuner.choices == dict.fromkeys((DOUBLE, SINGLE), PrecisionChoice(LOSSLESS, True))
    assert steps.tuner.described == dict.fromkeys((DOUBLE.name, SINGLE.name), "lossless") and steps.tuner.settled
    unknown = Steps(clock, 1.0, cached=PrecisionChoice(2.7, True))
    assert unknown.run() == (SCHEDULED, SCHEDULED)


def test_accepted_precisions_are_kept_before_all_are_chosen(clock: FakeClock) -> None:
    steps = Steps(clock, ALL_EXACT_SECONDS / 1.5, kinds=(DOUBLE,))
    steps.run(was_keyframe=True)
    for _ in range(T0_STEPS + TRIAL_STEPS):
        steps.run()
    assert steps.tuner.choices == {DOUBLE: PrecisionChoice(4.0, False)} and not steps.is_decided


def test_ranks_that_disagree_start_over(clock: FakeClock) -> None:
    steps = Steps(clock, ALL_EXACT_SECONDS / 1.5)
    for _ in range(1 + T0_STEPS + TRIAL_STEPS + 3):
        steps.run()
    steps.tuner._all_agree = lambda value: False
    steps.tuner.begin_run()
    steps.run()
    assert steps.tuner.choices == {}
    steps.tuner._all_agree = lambda value: True
    steps.decide()
    assert steps.precisions in best_by_hand(steps)


def test_steps_of_another_size_with_undecided_schedules_do_not_delay_the_choice(clock: FakeClock) -> None:
    steps = Steps(clock, ALL_EXACT_SECONDS / 0.02)
    small = DOUBLE._replace(sizes=SIZES._replace(num_values=64))
    steps.run(was_keyframe=True)
    for _ in range(T0_STEPS):
        assert not steps.tuner.choices
        clock.now += 9.0
        steps.tuner.end_tuned_step(StepLoad({small: KindLoad(1, 1, 10)}, True), is_usual=False)
        steps.run()
    assert steps.precisions == (LOSSLESS, LOSSLESS) and steps.tuner.settled


def run_auto_guided(clock: FakeClock, length: int) -> tuple[bool, list[set[float]]]:
    """Run guided runs of a few steps, and return whether all is chosen, and the precisions of each step."""
    runtime = CodecRuntime(partition_on("cpu"), "auto", None, list)
    tuner = PrecisionTuner(lambda kind, size: 0.0, list, lambda value: True, CPU)
    ran: list[set[float]] = []

    def precision_of(kind: LayerKind) -> float:
        ran[-1].add(precision := tuner.precision_of(kind))
        return precision

    runtime.precision_of = precision_of
    for _ in range(3):
        runtime.begin_run(length)
        tuner.begin_run()
        for _ in range(length):
            ran.append(set())
            for branch in (0, 1):
                for layer in range(3):
                    stats = runtime.layer_codecs(f"blocks.{layer}", layer, branch, SIZES).stats
                    stats.sent_bytes, stats.exact_bytes = 1, 10
            clock.now += 1.0
            runtime.end_step()
            tuner.end_tuned_step(runtime.take_load(), is_usual=True)
    return tuner.settled, ran


@pytest.mark.parametrize("length", [4, 6, 8, 12])
def test_short_guided_runs_are_tuned(clock: FakeClock, length: int) -> None:
    settled, ran = run_auto_guided(clock, length)
    assert settled
    # Guidance shows in the first step: kinds of the schedule before it are not tuned.
    assert ran[1 - length :] == [{LOSSLESS}] * (length - 1)


def test_loads_that_shrink_with_more_bits_are_timed_instead_of_predicted(clock: FakeClock) -> None:
    """A keyframe's bytes may have been taken for those of the lowest precision."""
    steps = Steps(clock, ALL_EXACT_SECONDS / 0.5, hidden=0.0, kinds=(DOUBLE,))
    steps.tuner._predict = lambda kind, size: 0.9 if size < EXACT_BYTES / 5 else size / steps._rate
    ran = steps.decide()
    assert len(ran) > 1 + T0_STEPS and steps.precisions[0] in (SCHEDULED, 4.0)
    assert steps.seconds(steps.precisions) <= 1.03 * steps.seconds((SCHEDULED,))


@pytest.mark.parametrize("interrupted_steps", [0, 3])
def test_a_choice_that_one_rank_has_missed_is_dropped_by_all(clock: FakeClock, interrupted_steps: int) -> None:
    """A rank is interrupted between the last mean and its choice; the other one has chosen, and perhaps run on."""
    chosen, missed = (Steps(clock, ALL_EXACT_SECONDS / 0.02) for _ in range(2))
    for each in (chosen, missed):
        for _ in range(T0_STEPS):
            each.run()
    with pytest.raises(KeyboardInterrupt), mock.patch.object(missed.tuner, "_choose", side_effect=KeyboardInterrupt):
        missed.run()
    for _ in range(1 + interrupted_steps):
        chosen.run()
    assert chosen.tuner.settled and not missed.tuner.choices
    told: list[list[object]] = []
    for each in (chosen, missed):
        told.append([])
        each.tuner._all_agree = lambda value: bool(told[-1].append(value))  # False
        each.tuner.begin_run()
        assert each.run(was_keyframe=True) == (SCHEDULED, SCHEDULED)  # messages of one size
    assert [len(each) for each in told] == [1, 1] and told[0] != told[1]
    assert chosen.tuner.choices == missed.tuner.choices == {}
    for _ in range(T0_STEPS):
        assert chosen.run() == missed.run() == (SCHEDULED, SCHEDULED)
    assert chosen.precisions == missed.precisions == (LOSSLESS, LOSSLESS)


def test_a_choice_on_which_ranks_agree_is_used_from_the_first_step_on(clock: FakeClock) -> None:
    steps = Steps(clock, ALL_EXACT_SECONDS / 0.02)
    steps.decide()
    first = []
    for _ in range(3):
        steps.tuner.begin_run()
        first.append(steps.run(was_keyframe=True))
        assert steps.run() == (LOSSLESS, LOSSLESS)
    assert first == [(SCHEDULED, SCHEDULED), (LOSSLESS, LOSSLESS), (LOSSLESS, LOSSLESS)]


# On ranks.


def run_auto(
    rank: int, seconds_by_rank: list[dict[float, float]], lengths: list[int], folder: str, fails_at: int | None = None
) -> list[tuple[list[float], list[bool], int]]:
    """Run a small FLUX.1 on a mock clock, whose steps take a time that depends on the precision of the first layers.

    Args:
        rank: this rank.
        seconds_by_rank: step time by precision, of each rank.
        lengths: steps of each run.
        folder: of the tuning cache.
        fails_at: step at which the first run ends on rank 0 before the step has ended.

    Returns:
        For each run: precision of the first layers in each step; whether O of each step is equal to stock's, if finite;
        bytes that the last step sent.
    """
    group, _, step = start(rank, depth=3)
    expected, clock = step(), FakeClock()
    topology = Topology.parse("node=2", 2)
    options = {"plan": Plan.flat(topology), "slow_axes": ("node",), "overlap": Overlap(True, 1)}
    config = CocoDiffConfig(topology=topology, mode="auto", **options)
    cache = tuning_cache.load_shared(group, {"test": 1}, {}, Path(folder))
    session = use_config(group, config, cache)
    found = []
    with mock.patch.object(step_tuner, "time", clock):
        for number, length in enumerate(lengths):
            session.runs.begin(length)
            precisions, equal = [], []
            for index in range(length):
                kinds = [*session.precision_tuner._kinds]
                precision = session.runtime.precision_of(kinds[0]) if kinds else SCHEDULED
                result = step()
                assert result.isfinite().all()
                equal.append(torch.equal(result, expected))
                precisions.append(precision)
                clock.now += seconds_by_rank[rank][precision]
                is_last = number == 0 and index == fails_at
                if not (is_last and rank == 0):
                    session.runs.end_step()
                if is_last:
                    break
            found.append((precisions, equal, session.runtime.reports[-1].sent_bytes))
    return found


FLAT_TIMES = {each: 1.0 for each in LADDER}


def test_ranks_raise_precisions_between_steps_and_keep_the_choice(tmp_path: Path) -> None:
    # The mean over ranks counts.
    uneven = [{**FLAT_TIMES, 8.0: 1.05, LOSSLESS: 1.2}, {**FLAT_TIMES, 8.0: 0.99, LOSSLESS: 1.1}]  # 8 bits add 2 %
    first, second = ranks.run(run_auto, 2, uneven, [50], str(tmp_path))
    precisions, equal, sent = first[0]
    assert precisions == second[0][0]
    assert {*precisions} == {*LADDER} and precisions[-1] == 8.0
    assert sum(one != other for one, other in pairwise(precisions)) > 8
    # All kinds are lossless in four steps, then the first one alone.
    lossless = [number for number, each in enumerate(precisions) if each == LOSSLESS][:4]
    assert all(equal[number] for number in lossless) and not any(equal[1:5])
    # Each step has the same input: after two lossless ones a residual of zero is left, if both ends keep references.
    assert all(equal[number + 1] for number in lossless if number - 1 in lossless)
    again = ranks.run(run_auto, 2, uneven, [14], str(tmp_path))
    assert [run[0][0] for run in again] == [[SCHEDULED, *[8.0] * 13]] * 2
    assert again[0][0][2] == sent


@pytest.mark.slow  # 70 steps on two ranks
@pytest.mark.parametrize("fails_at", [2, 9, 14])
def test_ranks_have_the_same_precisions_after_a_run_of_unequal_steps(tmp_path: Path, fails_at: int) -> None:
    first, second = ranks.run(run_auto, 2, [FLAT_TIMES] * 2, [40, 30], str(tmp_path), fails_at)
    assert [precisions for precisions, _, _ in first] == [precisions for precisions, _, _ in second]
    assert first[-1][0][-1] == LOSSLESS


def run_with_links(rank: int, rate: float) -> tuple[list[float], list[bool]]:
    """Return the precision of each step, and whether it is equal to stock's, where two nodes gather K and V."""
    group, _, step = start(rank, depth=3)
    expected, clock = step(), FakeClock()
    links = profile_of([2], [rate], latency=0.0, launch=0.0)
    options = {"slow_axes": (links.topology.axes[0].name,), "overlap": Overlap(True, 1)}
    config = CocoDiffConfig(topology=links.topology, mode="auto", **options)
    session = use_config(group, config, tuning_cache.TuningCache({}, links))
    session.runs.begin(14)
    precisions, equal = [], []
    with mock.patch.object(step_tuner, "time", clock):
        for _ in range(14):
            equal.append(torch.equal(step(), expected))
            assert {each.schedule for each in session.precision_tuner._kinds.values()} == {
                *map(session.runtime.precision_of, session.precision_tuner._kinds)
            }
            kinds = [*session.precision_tuner._kinds]
            precisions.append(session.runtime.precision_of(kinds[0]) if kinds else SCHEDULED)
            clock.now += 1.0
            session.runs.end_step()
        assert {kind.gathers_kv for kind in session.precision_tuner._kinds} == {True}
    return precisions, equal


@pytest.mark.parametrize(("rate", "expected"), [(1e12, LOSSLESS), (1.0, SCHEDULED)])
def test_links_that_are_known_to_be_fast_or_slow_enough_need_no_trial(rate: float, expected: float) -> None:
    for precisions, equal in ranks.run(run_with_links, 2, rate):
        assert precisions == [SCHEDULED] * 5 + [expected] * 9  # a keyframe, and four timed steps
        assert all(equal[-3:]) == (expected == LOSSLESS)
