"""Head groups of coded layers that gather K and V, on real ranks: outputs and references."""

import torch

from tests import ranks
from tests.xdit.attention.test_gathered_usp import Case, Run
from xfuser_cocodiff.xdit.layers.schedule_candidates import ScheduleCandidates
from xfuser_cocodiff.xdit.session.session import Session


def counts_of(session: Session) -> set[int]:
    """Return the numbers of head groups of all link references."""
    return {head_group.count for state in session.runtime.store.states.values() for _, head_group in state.link_states}


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
