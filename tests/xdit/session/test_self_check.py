"""Self-checks of a session across the real groups: plans at its start, references after the first coded step."""

import pytest
import torch

from benchmarks import bare_runtime
from tests import ranks
from tests.xdit.attention.test_overlap import start
from xfuser_cocodiff.engine.comm.plan_check import PlanCheckError
from xfuser_cocodiff.engine.comm.stages import Stages
from xfuser_cocodiff.engine.compression.reference_check import ReferenceCheckError
from xfuser_cocodiff.engine.compression.value_format import ValueFormat
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.session import startup
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig

STEPS = 4


def run(rank: int, topology: str, plan: str | None, options: dict, corrupt_on: int | None) -> tuple[int, str]:
    """Run some steps, of which one rank corrupts a reference after the first. Return the steps before an error,
    and the links that it names."""
    size = 2 if topology == "2x1" else 4
    group, _, step = start(rank, depth=2)
    parsed = Topology.parse(topology, size)
    config = CocoDiffConfig(
        topology=parsed, mode="balanced", slow_axes=("node",), plan=plan and Plan.parse(plan, parsed), **options
    )
    session = startup.create_session(group, config, values=ValueFormat())
    bare_runtime.use_session(session)
    session.begin_run(STEPS)
    for number in range(STEPS):
        step()
        if number == 0 and rank == corrupt_on:
            [state, *_] = session.runtime.store.link_states
            with torch.inference_mode():  # one bit of one value
                state.received._current[0].view(torch.uint8).view(-1)[0] ^= 1
        try:
            session.end_step()
        except ReferenceCheckError as error:
            assert "along node, first in layer" in str(error), str(error)
            return number, str(error).partition("between ranks ")[2].partition(";")[0]
    assert session.codecs.reference_check is None, "checked once"
    return STEPS, ""


CASES = [
    ("2x1", None, {}),  # K and V are gathered
    ("2x2", "hierarchical", {}),  # by heads, staged
    ("2x1", None, {"memory_budget": 200_000}),  # in int8
]


@pytest.mark.parametrize(("topology", "plan", "options"), CASES, ids=str)
def test_references_of_both_ends_are_equal(topology: str, plan: str | None, options: dict) -> None:
    size = 2 if topology == "2x1" else 4
    assert ranks.run(run, size, topology, plan, options, None) == [(STEPS, "")] * size


@pytest.mark.parametrize(("topology", "plan", "options"), CASES[:2], ids=str)
def test_a_corrupted_reference_is_an_error_of_every_rank(topology: str, plan: str | None, options: dict) -> None:
    size = 2 if topology == "2x1" else 4
    found = set(ranks.run(run, size, topology, plan, options, 1))
    assert len(found) == 1
    [(step, link)] = found
    assert step < STEPS and link.endswith(" to 1") and link.startswith("0" if size == 2 else "3")


def start_with_other_groups(rank: int) -> None:
    """Start a lossless session whose stages have the groups of other axes."""
    group, *_ = start(rank, depth=1)
    parsed = Topology.parse("2x2", 4)
    start_stage = Stages.start

    def permuted(self: Stages, buffer: object, plan: Plan, number: int) -> object:
        other = {(0,): (1,), (1,): (0,)}
        groups = {stage: self.groups[other.get(stage, stage)] for stage in self.groups}
        return start_stage(Stages(groups, self.device, traffic=self.traffic), buffer, plan, number)

    Stages.start = permuted
    config = CocoDiffConfig(topology=parsed, plan=Plan.hierarchical(parsed))
    startup.create_session(group, config, values=ValueFormat())


def test_permuted_groups_are_an_error_at_the_start() -> None:
    for error in ranks.outcomes(start_with_other_groups, 4):
        assert isinstance(error, PlanCheckError) and "hierarchical:gpu,node" in str(error)
