"""Tests of recorded steps in real time on gloo ranks: they take as long as computed by hand.

Links are unshaped, so with a large dilation messages take no time, and a step lasts as long as its kernels. Steps begin
together, and a busy machine may delay them: lower bounds are strict, upper ones leave 0.1 s for each message.
"""

import pytest
import torch.distributed as dist

from tests import ranks
from xfuser_cocodiff.lab.accelerator.program import GroupPattern, Program, RecordedCollective
from xfuser_cocodiff.lab.accelerator.time_line import Instant
from xfuser_cocodiff.lab.accelerator.transport import Outcome, Pace, Transport

BLOCKS, DILATION = 5, 50.0


def chain(world_size: int, size: int) -> Program:
    """Return a step of kernels of 2 ms, each of which waits for the collective before it."""
    group, program, tail = GroupPattern.of(range(world_size)), Program(), Instant()
    for _ in range(BLOCKS):
        tail = tail.after(2e-3)
        program.collectives.append(
            RecordedCollective(group, tail, (0, *[size] * (world_size - 1)), (size,) * world_size)
        )
        tail = tail.after_collective(program.collectives[-1])
    program.end = program.marks["end"] = tail.after(2e-3)
    return program


def run_chain(rank: int, world_size: int, size: int, thinning: int) -> Outcome:
    program = chain(world_size, size)
    return Transport([program]).run(program, Pace(DILATION, thinning, latency=lambda members: 1e-3))


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_step_takes_its_kernels_and_latencies(world_size: int) -> None:
    expected = (BLOCKS + 1) * 2e-3 + BLOCKS * 1e-3
    outcomes = ranks.run(run_chain, world_size, world_size, 1000, 1)
    for rank, outcome in enumerate(outcomes):
        assert expected <= outcome.seconds < 2 * expected + BLOCKS * outcome.late_seconds
        assert outcome.marks == {"end": outcome.seconds}
        assert outcome.sent_bytes == {peer: BLOCKS * 1000 for peer in range(world_size) if peer != rank}


def test_thinned_messages_are_shorter_and_never_empty() -> None:
    for outcome in ranks.run(run_chain, 2, 2, 1000, 8):
        assert [*outcome.sent_bytes.values()] == [BLOCKS * 125]
    for outcome in ranks.run(run_chain, 2, 2, 9, 8):
        assert [*outcome.sent_bytes.values()] == [BLOCKS * 8]


def run_unequal(rank: int) -> tuple[float, float]:
    """Return when a message of 3 bytes, thinned, arrives from a rank that reaches the collective late."""
    late = Instant(10e-3 * rank)
    collective = RecordedCollective(GroupPattern.of([0, 1]), late, (0, 3), (0, 3))
    program = Program([collective], end=Instant().after_collective(collective))
    outcome = Transport([program]).run(program, Pace(DILATION, thinning=100))
    return outcome.seconds, outcome.late_seconds


def test_thinned_messages_still_make_ranks_wait_for_each_other() -> None:
    for seconds, late in ranks.run(run_unequal, 2):
        assert 10e-3 - 1e-4 <= seconds < 20e-3 + late


def run_groups(rank: int) -> tuple[float, list[float], float]:
    """Run a collective over all ranks, which is late, and beside it three in pairs; return when they end."""
    pairs, everyone = GroupPattern.of([0, 1]), GroupPattern.of(range(4))
    program = Program([RecordedCollective(everyone, Instant(30e-3), (0, 9, 9, 9), (0, 9, 9, 9))])
    tail = Instant()
    for number in range(3):
        program.collectives.append(RecordedCollective(pairs, tail.after(2e-3), (0, 9), (0, 9)))
        tail = tail.after_collective(program.collectives[-1]).after(2e-3)
        program.marks[str(number)] = tail
    program.end = tail.after_collective(program.collectives[0])
    outcome = Transport([program]).run(program, Pace(DILATION))
    return outcome.seconds, [*outcome.marks.values()], outcome.late_seconds


def test_groups_run_beside_each_other() -> None:
    for seconds, pairs, late in ranks.run(run_groups, 4):
        assert 30e-3 <= seconds < 40e-3 + late
        for number, end in enumerate(pairs):
            assert 4e-3 * (number + 1) <= end < 30e-3


def run_contended(rank: int) -> list[float]:
    """Return the ends of two collectives, each of 1 ms on its links, with a rank that is late and with contention."""
    program, tail = Program(), Instant(10e-3 * rank)
    for number in range(2):
        program.collectives.append(RecordedCollective(GroupPattern.of([0, 1]), tail, (0, 9), (0, 9)))
        tail = program.marks[str(number)] = tail.after_collective(program.collectives[-1])
    pace = Pace(DILATION, contention=lambda collective: 10.0, unshaped=lambda sent: 1e-3 * DILATION)
    return [*Transport([program]).run(program, pace).marks.values()]


def test_contention_stretches_the_transfer_and_not_the_wait_for_a_late_rank() -> None:
    for first, second in ranks.run(run_contended, 2):
        assert 20e-3 <= first < 90e-3  # a stretched wait would end after 100 ms or more
        assert first + 10e-3 <= second


def fail(rank: int) -> bool:
    """Fail on rank 1 before its third collective."""
    program = chain(2, 1000)
    transport = Transport([program])
    if rank == 1:
        communicator = next(iter(transport._communicators.values()))
        transfer, calls = communicator.transfer, []

        def failing(start: float, sent: list[int], received: list[int]) -> float:
            calls.append(sent)
            if len(calls) == 3:
                raise OSError("broken link")
            return transfer(start, sent, received)

        communicator.transfer = failing
    try:
        transport.run(program, Pace(DILATION))
    except RuntimeError:
        return True
    raise AssertionError("the other rank ended")


def test_a_failing_rank_does_not_hang_the_others() -> None:
    healthy, failed = ranks.outcomes(fail, 2)
    assert isinstance(failed, OSError) and str(failed) == "broken link"
    assert isinstance(healthy, (bool, RuntimeError))  # of the last barrier, in which the other rank is missing
    assert "still running" not in str(healthy)


def run_again(rank: int) -> list[float]:
    """Run a step at two dilations, one after the other."""
    program = chain(4, 100)
    transport = Transport([program])
    outcomes = [transport.run(program, Pace(dilation)) for dilation in (DILATION, 4 * DILATION)]
    dist.barrier()
    return [outcome.seconds - BLOCKS * outcome.late_seconds for outcome in outcomes]


def test_times_do_not_depend_on_the_dilation() -> None:
    for times in ranks.run(run_again, 4):
        assert max(times) < 2 * (BLOCKS + 1) * 2e-3
