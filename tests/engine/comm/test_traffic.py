"""Traffic statistics, from given bytes, and ranges in profiler traces."""

import torch

from xfuser_cocodiff.engine.comm.comm_stream import CommStream
from xfuser_cocodiff.engine.comm.traffic import Label, Traffic
from xfuser_cocodiff.engine.topology.devices import CPU
from xfuser_cocodiff.tools.comparison.stage_timer import StageTimer


def test_bytes_are_those_for_other_ranks() -> None:
    traffic = Traffic()
    traffic.count_bytes("node", 3, 10)
    traffic.count_bytes("node", 2, 5)
    assert (traffic.sent_bytes, traffic.calls) == ({"node": 20 + 5}, {"node": 2})
    traffic.reset()
    assert (traffic.sent_bytes, traffic.calls) == ({}, {})


def test_communication_has_ranges_in_profiler_traces() -> None:
    """Whether it runs in the thread of the comm stream or in the caller's, and whether it is timed."""
    comm_stream = CommStream.on(CPU)
    with torch.profiler.profile() as profiler:
        comm_stream.start(Label("v"), lambda: None, is_blocking=True).wait()
        comm_stream.start_collective(Label("o"), lambda: lambda: None).wait()
        for time_stage in (Traffic().time_stage, StageTimer()):
            with time_stage("node", CPU):
                pass
    names = [one.name for one in profiler.events()]
    ranges = [f"cocodiff.{tensors}.{part}" for tensors in "vo" for part in ("collective", "wait")]
    assert {name: names.count(name) for name in ranges} == dict.fromkeys(ranges, 1)
    assert names.count("cocodiff.node") == 2
