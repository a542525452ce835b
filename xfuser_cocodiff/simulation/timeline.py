"""A timeline: tasks that wait for each other and for a resource that does one thing at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

COMPUTE = "compute"
LINK = "link"


@dataclass(frozen=True)
class Task:
    """Something that keeps a resource busy."""

    name: str
    resource: str
    seconds: float
    after: tuple[str, ...] = ()
    """Tasks that must be done before, besides those that stand earlier in the resource's queue."""


def finish(tasks: Sequence[Task]) -> dict[str, float]:
    """When each task is done. A resource takes its tasks in the order given, as a device stream does.

    Raises:
        KeyError: a task waits for one that does not stand before it.
    """
    free: dict[str, float] = {}
    done: dict[str, float] = {}
    for task in tasks:
        start = max([free.get(task.resource, 0.0), *(done[name] for name in task.after)])
        done[task.name] = free[task.resource] = start + task.seconds
    return done


def makespan(tasks: Sequence[Task]) -> float:
    """Seconds until all tasks are done."""
    return max(finish(tasks).values(), default=0.0)


def busy(tasks: Sequence[Task], resource: str, prefix: str = "") -> float:
    """Seconds that the tasks of a resource take whose names begin with `prefix`."""
    mine = (task.seconds for task in tasks if task.resource == resource and task.name.startswith(prefix))
    return sum(mine, 0.0)
