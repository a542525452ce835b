"""Head groups of coded layers that gather K and V, on real ranks: outputs, messages, references, and their choice."""

from unittest import mock

import pytest
import torch

from tests import ranks
from tests.quick import slow
from tests.xdit.attention.test_gathered_usp import STEPS, Case, Run
from tests.xdit.attention.test_head_group_choice import ACCELERATOR, LINKS
from tests.xdit.attention.test_head_group_choice import Run as TimedRun
from xfuser_cocodiff.engine.autotune import plan_selection
from xfuser_cocodiff.xdit.layers.schedule_candidates import ScheduleCandidates
from xfuser_cocodiff.xdit.session.session import Session

COARSE = "bits=2,predictor=0"
"""Codecs whose errors show, with a predictor whose gain does not depend on which heads share a message."""


def counts_of(session: Session) -> set[int]:
    """Return the numbers of head groups of all link references."""
    return {head_group.count for state in session.runtime.store.states.values() for _, head_group in state.link_states}


def by_groups(rank: int, groups: int) -> tuple[list[torch.Tensor], list[list[int]], set[int], int]:
    """Return outputs of a run with a set number of head groups, heads in messages, and what references hold."""
    run = Run(rank, Case())
    session = run.session("balanced", None, schedule=COARSE, groups=groups)
    run.steps(session)  # in which the layer is detected and verified
    counts: set[int] = set()
    run.transformer.register_forward_hook(lambda *_: counts.update(counts_of(session)))
    outputs = run.steps(session)
    return outputs, list(run.gathered), counts, session.runtime.reports[-1].reference_bytes


@pytest.mark.slow  # no quick test compares outputs of two numbers
def test_head_groups_change_neither_outputs_nor_memory() -> None:
    found = {groups: ranks.run(by_groups, 4, groups) for groups in (1, 2)}
    for one, two in zip(found[1], found[2], strict=True):
        assert all(map(torch.equal, one[0], two[0]))
        assert (len(one[1]), len(two[1])) == (2 * STEPS, 3 * STEPS)  # V and Q, K; then Q, K and V of the second group
        assert (one[2], two[2]) == ({1}, {2})
        assert one[3] == two[3] > 0


def switch(rank: int) -> list[tuple[float, set[int], bool]]:
    """Return for each step the error, the numbers of head groups of references, and whether the step is timed, where
    the number changes in the third and back in the fifth step."""
    run = Run(rank, Case(topology="node=2"))
    run.session("exact", "hierarchical")
    session, found = run.session("balanced", None, schedule="bits=8"), []
    run.steps(session)
    [signature] = session.layers.signatures
    schedule = signature.candidates.schedule
    signature.candidates = ScheduleCandidates([schedule, schedule._replace(groups=2)])
    signature.is_same[2, False] = True
    session.schedule_tuner = None
    session.begin_run(6)
    for step, candidate in enumerate([0, 0, 1, 1, 0, 0]):
        signature.candidates.candidate = candidate
        with torch.no_grad():
            output = run.transformer(run.shards[0] * (1 + 0.1 * step))
        exact = run.attention_of(run.inputs[0] * (1 + 0.1 * step))
        is_timed, counts = signature.candidates.is_representative, counts_of(session)
        signature.candidates.end_step()
        session.end_step()
        found.append(((output - exact).abs().max().item(), counts, is_timed))
    return found


def test_another_number_restarts_references_with_a_keyframe_that_is_not_timed() -> None:
    for steps in ranks.run(switch, 2):
        assert [counts for _, counts, _ in steps] == [{1}, {1}, {2}, {2}, {1}, {1}]
        assert [is_timed for *_, is_timed in steps] == [False, True, False, True, False, True]
        assert all(error < 0.05 for error, *_ in steps)


def two_branches(rank: int) -> tuple[list[set[int]], set[float]]:
    """Return the numbers of head groups in each step, and at last the weights of the leading branch in the other one,
    where both branches were tuned by themselves and chose different numbers."""
    run = Run(rank, Case(topology="node=2"))
    session, found = run.session("balanced", None, schedule="bits=8"), []
    session.schedule_tuner = None
    session.begin_run(6)
    for step in range(6):
        signatures = session.layers.signatures
        if step == 2:
            longest_first = sorted(signatures, key=lambda each: each.sizes, reverse=True)
            for signature, groups in zip(longest_first, (2, 1), strict=True):
                signature.candidates = ScheduleCandidates([signature.candidates.schedule._replace(groups=groups)])
                signature.is_same[groups, False] = True
        with torch.no_grad():
            for branch in (run.shards[0], run.shards[0][:, ::2]):
                run.transformer(branch * (1 + 0.1 * step))
        found.append(counts_of(session))
        for signature in signatures:
            if signature.candidates:
                signature.candidates.end_step()
        if step == 5:
            states = [state for (_, branch), state in session.runtime.store.states.items() if branch]
            differences = {each.sent.is_difference for state in states for each in state.link_states.values()}
        session.end_step()
    return found, differences


def test_branches_of_other_lengths_have_numbers_of_their_own() -> None:
    for counts, differences in ranks.run(two_branches, 2):
        assert counts == [{1}] * 2 + [{1, 2}] * 4 and differences == {False}


def tune(rank: int, seconds: dict[int, float]) -> tuple[set[int], list[int], set[int]]:
    """Return the candidates' numbers of head groups, those chosen, and those of references after the choice."""
    run = TimedRun(rank, seconds, mode="balanced", slow_axes=("node",))
    with mock.patch.object(plan_selection, "devices", ACCELERATOR):
        session = run.session()
    run.steps(session, 3 + 16 + 8)  # eight of them restart references
    signatures = [each for each in session.layers.signatures if each.candidates]
    numbers = {each.groups for signature in signatures for each in signature.candidates.schedules}
    return numbers, [signature.candidates.chosen.groups for signature in signatures], counts_of(session)


@pytest.mark.parametrize(("seconds", "chosen"), [({1: 1.0, 2: 0.8, 4: 0.9}, 2), slow({1: 1.0, 2: 1.1, 4: 1.2}, 1)])
def test_accelerators_choose_the_number_by_steps(seconds: dict[int, float], chosen: int) -> None:
    assert LINKS.topology.size == 2
    for numbers, choices, counts in ranks.run(tune, 2, seconds):
        assert numbers == {1, 2, 4}
        assert choices == [chosen] * 2 and counts == {chosen}


def mask_later(rank: int) -> list[float]:
    """Return errors of steps whose attention cannot gather from the third one on, with two head groups."""
    from tests.xdit.attention.test_gathered_usp import TOKENS, whole

    run = Run(rank, Case(topology="node=2"))
    mask = {"attention_kwargs": {"attn_mask": whole(7, TOKENS, TOKENS) < 1}}
    steps, options = [{"attention_kwargs": None}] * 2 + [mask] * (STEPS - 2), []
    run.transformer.register_forward_pre_hook(lambda *_: run.attention.options.update(options.pop()))
    outputs = []
    for mode in ("exact", "balanced"):
        session = run.session(mode, None if mode == "balanced" else "hierarchical", groups=2)
        options[:] = [{"attention_kwargs": None}] * STEPS
        run.steps(session)
        options[:] = steps[::-1]
        outputs.append(run.steps(session))
    return [(lossy - exact).abs().max().item() for exact, lossy in zip(*outputs, strict=True)]


def test_layers_that_stop_gathering_send_all_heads_at_once() -> None:
    for errors in ranks.run(mask_later, 2):
        assert all(error < 0.05 for error in errors)
