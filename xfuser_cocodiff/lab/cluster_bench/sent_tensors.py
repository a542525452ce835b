"""Names the tensors that recorded collectives send: the plugin's by their labels, stock's by their order in a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from xfuser_cocodiff.engine.comm.comm_stream import CommStream, Handle
from xfuser_cocodiff.engine.comm.traffic import Label
from xfuser_cocodiff.lab.accelerator.clock import Clock
from xfuser_cocodiff.lab.accelerator.program import Program


@contextmanager
def name_by_label(clock: Clock) -> Iterator[None]:
    """Return a context in which the plugin's collectives have the letters of the tensors that they send.

    On an accelerator, all collectives of an operation are started with it.
    """
    start = CommStream.start

    def name_and_start(comm_stream: CommStream, label: Label, *arguments: Any, **options: Any) -> Handle[Any]:
        clock.sent_tensors = label.tensors
        return start(comm_stream, label, *arguments, **options)

    with mock.patch.object(CommStream, "start", name_and_start):
        yield


def name_by_order(program: Program, has_ulysses: bool) -> None:
    """Set the letters of the tensors that collectives of stock's schedule send.

    A block sends Q, K and V in one all-to-all or in several, then K and V around a ring, then O in the last all-to-all.

    Args:
        program: the recorded step.
        has_ulysses: whether the Ulysses degree is above 1, so that a block begins with an all-to-all.
    """
    for name, begin in program.counts.items():
        if not name.endswith(" begin"):
            continue
        end = program.counts[name.removesuffix("begin") + "end"]
        block = program.collectives[begin.collectives : end.collectives]
        all_to_alls = [each for each in block if has_ulysses and each.group == block[0].group]
        for each in block:
            each.tensors = "kv" if each not in all_to_alls else "o" if each is all_to_alls[-1] else "qkv"
