"""Tests of instants: they resolve to what a simulation with known ends gives, whatever was dropped on the way."""

import random

import pytest

from benchmarks.accelerator.time_line import Instant


class Queue:
    """A stream whose time is followed twice: as an instant, and as a number given the collectives' durations."""

    def __init__(self) -> None:
        self.instant, self.time = Instant(), 0.0


class Collective:
    def __init__(self, queue: Queue, seconds: float) -> None:
        self.start, self.end = queue.instant, queue.time + seconds


def program(steps: int, seed: int) -> tuple[list[Queue], list[Collective]]:
    """Return three streams after random kernels, waits and collectives."""
    choose = random.Random(seed)
    queues, collectives = [Queue() for _ in range(3)], list[Collective]()
    for _ in range(steps):
        queue, other = choose.sample(queues, 2)
        kind = choose.choice(["kernel", "stream", "start", "wait", "wait"])
        if kind == "kernel":
            seconds = choose.choice([0.0, 0.5, 1.0, 3.0])
            queue.instant, queue.time = queue.instant.after(seconds), queue.time + seconds
        elif kind == "stream":
            queue.instant, queue.time = queue.instant.latest(other.instant), max(queue.time, other.time)
        elif kind == "start":
            collectives.append(Collective(queue, choose.choice([0.0, 0.1, 2.0, 20.0])))
        elif collectives:
            collective = choose.choice(collectives[-4:])
            queue.instant = queue.instant.after_collective(collective)
            queue.time = max(queue.time, collective.end)
    return queues, collectives


@pytest.mark.parametrize("steps", [5, 20, 100])
def test_instants_resolve_to_the_simulated_times(steps: int) -> None:
    for seed in range(200):
        queues, collectives = program(steps, seed)
        ends = {each: each.end for each in collectives}
        for queue in queues:
            assert queue.instant.resolve(ends) == pytest.approx(queue.time), seed
        for each in collectives:
            assert each.start.resolve(ends) <= each.end + 1e-9
