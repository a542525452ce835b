"""Codecs in xDiT's transformers on real ranks: planned reference memory, budgets and log messages."""

import re
from typing import Any

import torch

from tests import ranks
from tests.xdit.test_approximation import decibels

STEPS, DEGREE = 4, 2


class SmallRuns:
    """Runs of a small transformer, with log messages and reference memory."""

    def __init__(self, rank: int) -> None:
        from tests.small_transformers import MODELS, prepare_ranks

        prepare_ranks(rank, DEGREE)
        self.small = MODELS["HunyuanVideo"](text=8)

    def use(self, **options: Any) -> None:
        from tests.small_transformers import use
        from xfuser_cocodiff.xdit.session.session import active

        flat = {"topology": f"node={DEGREE}", "a2a": "flat", "slow_axes": "node"}
        use(self.small, DEGREE, mode="balanced", **flat, **options)
        self.runtime, self.logged = active().runtime, []
        self.runtime.reporter.info = self.runtime.reporter.warn = self.logged.append

    def run(self) -> tuple[list[int], list[int]]:
        """Return planned and allocated reference bytes after each step."""
        import xfuser_cocodiff

        planned = []
        with xfuser_cocodiff.run(STEPS) as run:

            def end_step() -> None:
                planned.append(self.runtime.store.planned_bytes)
                run.step()

            self.latents = self.small.denoise(STEPS, end_step)
        return planned, [report.reference_bytes for report in self.runtime.reports]


def reference_bytes(rank: int) -> tuple[list[int], list[int], list[str]]:
    runs = SmallRuns(rank)
    runs.use()
    return *runs.run(), runs.logged


def test_planned_reference_bytes_equal_allocated_bytes() -> None:
    for planned, allocated, logged in ranks.run(reference_bytes, 2):
        assert set(planned) == {allocated[-1]} and allocated[-1] > 0
        assert [line for line in logged if line.startswith("link references of 4 layers: ")], logged


def run_with_budgets(rank: int) -> list[tuple[list[int], list[str], list[int], int, torch.Tensor]]:
    """Return memory, log messages, lossless layers, bytes and latents with all memory, with 60% and with 20% of it."""
    runs, found, full_bytes = SmallRuns(rank), [], None
    for fraction in (1, 0.6, 0.2):  # unlimited, no predictions, and some layers without references
        # Without V-First: V as a message of its own has a flag, and the tuner's choice would show in the bytes.
        runs.use(memory_budget=full_bytes and full_bytes * fraction / 2**30, v_first="off")
        for _ in range(2):
            runs.logged.clear()
            _, sizes = runs.run()
            reports = runs.runtime.reports
            sent = sum(report.sent_bytes for report in reports)
            found.append((sizes, list(runs.logged), [report.exact_layers for report in reports], sent, runs.latents))
        full_bytes = full_bytes or sizes[-1]
    return found


def test_memory_budgets_take_predictions_first_and_references_then() -> None:
    for found in ranks.run(run_with_budgets, 2):
        sizes, _, _, full_sent, full = found[0]
        full_bytes = sizes[-1]
        for (sizes, logged, exact, sent, latents), fraction in zip(found, (1, 1, 0.6, 0.6, 0.2, 0.2), strict=True):
            assert fraction == 1 or max(sizes) <= fraction * full_bytes  # without a limit, values are kept in step 0
            assert not any(exact)
            # Warned in the second run of a session too.
            is_short = any(re.search("[1-4] of 4 layers have none and send 8 bits", line) for line in logged)
            assert is_short == (fraction == 0.2), logged
            assert sent > 1.02 * full_sent if fraction == 0.2 else sent > 0.9 * full_sent
            assert decibels(latents, full) > 20


def run_by_free_memory(rank: int) -> tuple[int, int, float]:
    """Return the bytes of a run with all references and of one where a rank has a fifth of the memory, and its PSNR."""
    from xfuser_cocodiff.engine.compression import reference_memory
    from xfuser_cocodiff.engine.topology.device_memory import DeviceMemory

    runs = SmallRuns(rank)
    runs.use(v_first="off")
    _, sizes = runs.run()
    full, free = runs.latents, sizes[-1] * (1.0, 0.2)[rank]
    full_bytes = sum(report.sent_bytes for report in runs.runtime.reports)
    reference_memory.default_budget = lambda memory, *_: memory.free  # the reserve would be all of a small model
    runs.runtime.store._device_memory = lambda: DeviceMemory(free, 0)
    runs.run()
    sent_bytes = sum(report.sent_bytes for report in runs.runtime.reports)
    return full_bytes, sent_bytes, decibels(runs.latents, full)


def test_ranks_with_different_free_memory_code_the_same_layers() -> None:
    first, second = ranks.run(run_by_free_memory, 2)
    assert first == second
    full_bytes, sent_bytes, quality = first
    assert sent_bytes > 1.02 * full_bytes and quality > 20  # some layers send 8 bits at all steps
