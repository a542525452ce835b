"""Self-check of a session across the real groups: references after the first coded step."""

import pytest
import torch

from benchmarks import bare_runtime
from tests import ranks
from tests.xdit.attention.test_overlap import start
from xfuser_cocodiff.engine.compression.head_format import HeadFormat
from xfuser_cocodiff.engine.compression.reference_check import ReferenceCheckError
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.session import startup
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig

STEPS = 4


def run(rank: int, topology: str, plan: str | None) -> tuple[int, str]:
    """Run some steps, of which rank 1 corrupts a reference after the first. Return the steps before an error, and the
    links that it names."""
    size = 2 if topology == "2x1" else 4
    group, _, step = start(rank, depth=2)
    parsed = Topology.parse(topology, size)
    plan = plan and Plan.parse(plan, parsed)
    config = CocoDiffConfig(topology=parsed, mode="balanced", slow_axes=("node",), plan=plan)
    session = startup.create_session(group, config, values=HeadFormat())
    bare_runtime.use_session(session)
    session.begin_run(STEPS)
    for number in range(STEPS):
        step()
        if number == 0 and rank == 1:
            [state, *_] = session.runtime.store.link_states
            with torch.inference_mode():  # one bit of one value
                state.received._current[0].view(torch.uint8).view(-1)[0] ^= 1
        try:
            session.end_step()
        except ReferenceCheckError as error:
            assert "along node, first in layer" in str(error), str(error)
            return number, str(error).partition("between ranks ")[2].partition(";")[0]
    return STEPS, ""


@pytest.mark.parametrize(("topology", "plan"), [("2x1", None), ("2x2", "hierarchical")], ids=["gathered", "by heads"])
def test_a_corrupted_reference_is_an_error_of_every_rank(topology: str, plan: str | None) -> None:
    size = 2 if topology == "2x1" else 4
    found = set(ranks.run(run, size, topology, plan))
    assert len(found) == 1
    [(step, link)] = found
    assert step < STEPS and link.endswith(" to 1") and link.startswith("0" if size == 2 else "3")
