"""Tests of the emulated device: what collectives record, and when the host waits for it. Times are computed by hand."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests import ranks
from tests.benchmarks.accelerator.emulated import CALL, ROUND, SHORTEST, accelerator

if TYPE_CHECKING:
    from benchmarks.accelerator.device import EmulatedAccelerator

HOST, DEVICE = 1.0, 100.0
"""Ends of a collective in these tests, after 100 s, and of the kernel before the host's waits."""


def kernel(emulator: "EmulatedAccelerator", seconds: float = DEVICE) -> torch.Tensor:
    """Run a pointwise kernel of some duration and return its result."""
    return torch.empty(round(seconds * ROUND.bytes_per_second / 8), device=emulator.device) * 2.0


def sizes(rank: int) -> dict[str, list[tuple[tuple[int, ...], bool]]]:
    """Return bytes sent, and whether it is an all-gather, of each collective of each case."""
    with accelerator(4) as emulator:
        given = torch.empty(8, 5, dtype=torch.bfloat16, device=emulator.device)
        received = torch.empty_like(given)
        group = dist.group.WORLD
        gathered = torch.empty(32, 5, dtype=torch.bfloat16, device=emulator.device)
        cases: dict[str, Callable[[], Any]] = {
            "all-to-all": lambda: dist.all_to_all_single(received, given),
            "async": lambda: dist.all_to_all_single(received, given, async_op=True).wait(),
            "splits": lambda: dist.all_to_all_single(received, given, [2, 1, 1, 4], [1, 0, 5, 2]),
            "all-gather": lambda: dist.all_gather_into_tensor(gathered, given),
            "functional": lambda: functional.all_to_all_single(given, None, None, group) + 1,
            "functional splits": lambda: functional.all_to_all_single(given, [2, 1, 1, 4], [1, 0, 5, 2], group) + 1,
            "functional all-gather": lambda: functional.all_gather_tensor(given, 0, group) + 1,
            "permutation": lambda: functional.permute_tensor(given.flatten(), [1, 2, 3, 0], group) + 1,
            "ring by all-gather": lambda: ring(emulator, group, "allgather"),
            "ring": lambda: ring(emulator, group, "alltoall"),
        }
        recorded = {}
        for name, case in cases.items():
            emulator.begin_step()
            case()
            recorded[name] = [(each.sent, each.is_gather) for each in emulator.end_step().collectives]
    return recorded


def ring(emulator: "EmulatedAccelerator", group: dist.ProcessGroup, method: str) -> None:
    """Run the ring attention that stock xDiT uses, with one of its ways to rotate K and V."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    _attention._cp_options.enable_load_balance = False
    _attention.set_rotate_method(method)
    query = torch.empty(1, 2, 16, 64, dtype=torch.bfloat16, device=emulator.device)
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    _attention._templated_ring_attention(group, 2, flash, query, query, query)


def test_collectives_have_the_bytes_of_each_peer() -> None:
    [recorded] = ranks.run(sizes, 1)
    even, split = (20, 20, 20, 20), (10, 0, 50, 20)
    key_and_value = 2 * 2 * 16 * 64 * 2
    assert recorded == {
        "all-to-all": [(even, False)],
        "async": [(even, False)],
        "splits": [(split, False)],
        "all-gather": [((80,) * 4, True)],
        "functional": [(even, False)],
        "functional splits": [(split, False)],
        "functional all-gather": [((80,) * 4, True)],
        "permutation": [((0, 80, 0, 0), False)],
        "ring by all-gather": [((key_and_value,) * 4, True)],
        "ring": [((0, key_and_value, 0, 0), False)] * 3,
    }


def waits(rank: int) -> dict[str, tuple[float, float]]:
    """Return when host and device end with and without a wait, if the collective ends after 1000 s."""
    with accelerator(2) as emulator:
        cases: dict[str, Callable[[torch.Tensor], Any]] = {
            "never waited for": lambda given: dist.all_to_all_single(torch.empty_like(given), given, async_op=True),
            "work": lambda given: dist.all_to_all_single(torch.empty_like(given), given, async_op=True).wait(),
            "synchronous": lambda given: dist.all_to_all_single(torch.empty_like(given), given),
            "functional": lambda given: functional.all_to_all_single(given, None, None, dist.group.WORLD) * 2.0,
        }
        ends = {}
        for name, case in cases.items():
            given = torch.empty(64, device=emulator.device)
            emulator.begin_step()
            case(given)
            [collective] = emulator.program.collectives
            known = {collective: 1000.0}
            stream = emulator.streams[-1].tail.resolve(known)
            ends[name] = stream, emulator.host_time.resolve(known), emulator.end_step().end.resolve(known)
    return ends


def test_a_stream_waits_for_a_collective_when_its_result_is_needed_and_the_step_for_all() -> None:
    [ends] = ranks.run(waits, 1)
    for name, (stream, host, step) in ends.items():
        assert host < HOST, name  # only the device waits
        assert step == pytest.approx(1000 + (SHORTEST if name == "functional" else 0)), name
        assert (stream >= 1000) == (name != "never waited for"), name


def blocking(rank: int) -> dict[str, float]:
    """Return when the host goes on after a call that follows a kernel of 100 s."""
    with accelerator() as emulator:
        on_host, pinned = torch.zeros(3), torch.zeros(3)
        side = torch.Stream(emulator.device)

        def wait_beside(result: torch.Tensor) -> None:
            with side:
                result[:3].cpu()

        cases: dict[str, Callable[[torch.Tensor], Any]] = {
            "nothing": lambda result: result[:3] + 1,
            "cpu": lambda result: result[:3].cpu(),
            "copy to host": lambda result: pinned.copy_(result[:3]),
            "async copy to host": lambda result: pinned.copy_(result[:3], non_blocking=True),
            "copy from host": lambda result: on_host.to(emulator.device),
            "async copy from host": lambda result: on_host.to(emulator.device, non_blocking=True),
            "copy into a tensor": lambda result: result[:3].copy_(on_host),
            "new tensor": lambda result: torch.tensor([1.0], device=emulator.device),
            "another stream": wait_beside,
            "event": lambda result: emulator.streams[-1].record_event().synchronize(),
        }
        ends = {}
        for name, case in cases.items():
            emulator.begin_step()
            case(kernel(emulator))
            ends[name] = emulator.host_time.floor
    return ends


def test_calls_that_need_values_make_the_host_wait() -> None:
    [ends] = ranks.run(blocking, 1)
    free = ("nothing", "async copy to host", "async copy from host", "another stream")
    for name, end in ends.items():
        assert (end > DEVICE) == (name not in free), name
        assert end < DEVICE + HOST, name


def next_step(rank: int) -> tuple[float, int]:
    """Return the end of a step that waits for a collective and an event of the step before."""
    with accelerator(2) as emulator:
        given = torch.empty(64, device=emulator.device)
        work = dist.all_to_all_single(torch.empty_like(given), given, async_op=True)
        kernel(emulator)
        event = emulator.streams[-1].record_event()
        emulator.begin_step()
        work.wait()
        emulator.streams[-1].wait_event(event)
        end = emulator.end_step().end
        return end.floor, len(end.offsets)


def test_work_of_an_earlier_step_has_ended() -> None:
    assert ranks.run(next_step, 1) == [(pytest.approx(CALL), 0)]
