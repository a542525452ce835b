"""What a record says of the choices of a session."""

import json

from benchmarks.soak import decisions
from tests import ranks
from tests.engine.topology.test_planner import profile_of
from tests.xdit.attention.test_overlap import start, use_config
from tests.xdit.session.test_session import config_of
from xfuser_cocodiff.xdit.session.session import Session
from xfuser_cocodiff.xdit.settings.config import Overlap


def recorded(rank: int) -> list[dict]:
    """Return the decisions of a session with fixed options, and of one that plans by a profile."""
    group, _, step = start(rank, depth=3)
    profile = profile_of([2], [1e6], latency=1e-3, launch=1e-6)
    found = []
    for options in ({}, {"plan": None, "profile": profile, "overlap": Overlap()}):
        session = use_config(group, config_of("balanced", **options))
        session.begin_run(4)
        step()
        session.end_step()
        found.append(json.loads(json.dumps(decisions.of_run(session))))
        session.close()
    return found


def test_decisions_are_equal_on_all_ranks_and_complete() -> None:
    (fixed, planned), other = ranks.run(recorded, 2)
    assert [fixed, planned] == other
    assert set(fixed["plans"].values()) == {"flat"}
    assert fixed["profile"] is None and planned["profile"]["links"][0]["bytes_per_second"] == 1e6
    assert fixed["codec_schedule"].startswith("first=") and fixed["kernels"]
    assert all(schedules and "not chosen" not in schedules for schedules in fixed["schedules"].values())
    assert ["not chosen"] in planned["schedules"].values()  # after one step


def test_stock_decides_nothing() -> None:
    assert decisions.of_run(Session()) == {}
