"""xDiT's process groups without a pipeline."""

import os

from tests import ranks
from xfuser_cocodiff.engine.comm.groups import timeout_of
from xfuser_cocodiff.engine.topology.devices import CPU
from xfuser_cocodiff.tools.launching import rank_group


def timeouts(rank: int) -> list[float]:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")  # not used: the ranks have a store already
    world = rank_group.start(timeout=77)
    return [timeout_of(group, CPU).total_seconds() for group in (world, *rank_group.process_groups())]


def test_timeout_is_that_of_all_groups() -> None:
    assert ranks.run(timeouts, 2) == [[77] * 3] * 2
