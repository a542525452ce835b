"""Work of each rank by itself, whose results all ranks learn, or its failure."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from xfuser_cocodiff.engine.comm import failure_detection

T = TypeVar("T")


class RankError(RuntimeError):
    """Work of some ranks failed; every rank raises the same error."""


def gather_results(work: Callable[[], T], group: dist.ProcessGroup | None, stage: str) -> list[T]:
    """Run work that communicates with no other rank, and return the results of all ranks, by rank.

    Every rank of the group must call this. One whose work fails still reports it, so that none waits for it.

    Args:
        work: returns what can be pickled.
        group: the ranks, best in a group for host memory; None for this rank alone.
        stage: name of the work, for errors.

    Raises:
        RankError: the work failed on a rank, on every rank; with the message of the first such rank.
    """
    outcome: tuple[Any, str | None]  # the result, or the failure
    try:
        outcome = work(), None
    except Exception as error:  # of any type: of a compiler, a driver, an allocation
        outcome = None, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    outcomes: list[tuple[Any, str | None]] = [outcome]
    if group is not None:
        outcomes = [(None, None)] * group.size()
        with failure_detection.report_failed_ranks(group, stage):
            dist.all_gather_object(outcomes, outcome, group=group)
    failures = {rank: failure for rank, (_, failure) in enumerate(outcomes) if failure}
    if failures:
        rank, failure = next(iter(failures.items()))
        raise RankError(f"{stage} failed on {len(failures)} of {len(outcomes)} ranks (rank {rank}: {failure})")
    return [result for result, _ in outcomes]
