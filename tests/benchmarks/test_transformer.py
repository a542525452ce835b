"""The step that benchmarks time."""

import os
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import bare_runtime, transformer
from benchmarks.transformer import Shape
from tests import ranks


class Operations(TorchDispatchMode):
    """Context that lists the operations that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def operations_of_a_step(rank: int) -> list[str]:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")  # not used: the ranks have a store already
    bare_runtime.start()
    step = transformer.step(Shape(width=64, depth=3, tokens=16, heads=4))
    with Operations() as operations:
        step(0.3)
    return operations.names


def test_a_step_copies_no_value_from_the_host() -> None:
    """On an accelerator the host would wait for it, and for the step before."""
    [names] = ranks.run(operations_of_a_step, 1)
    assert len(names) > 100 and "aten::lift_fresh" not in names
