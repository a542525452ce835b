"""Codecs in xDiT's transformers on real ranks: planned reference memory, schedule files, budgets and log messages."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.quick import slow_but
from tests.xdit.test_approximation import decibels
from xfuser_cocodiff.engine.compression.bit_allocation import LETTERS, NOT_SENT, BitAllocation

STEPS = 4


class SmallRuns:
    """Runs of a small transformer, with log messages and reference memory."""

    def __init__(self, rank: int, degree: int, model: str) -> None:
        from tests.small_transformers import MODELS, prepare_ranks

        prepare_ranks(rank, degree)
        self.small, self.degree = MODELS[model](), degree

    def use(self, **options: Any) -> None:
        from xfuser import xFuserArgs
        from xfuser.core.distributed import initialize_runtime_state

        from xfuser_cocodiff.xdit.session.session import active

        options = {"use_cocodiff": True, "cocodiff_mode": "balanced", "cocodiff_slow_axes": "node", **options}
        options |= {"cocodiff_topology": f"node={self.degree}", "cocodiff_a2a": "flat"}
        config, _ = xFuserArgs(model="small", ulysses_degree=self.degree, **options).create_config()
        initialize_runtime_state(self.small.pipeline, config)
        self.small.ready()
        self.runtime, self.logged = active().runtime, []
        if self.runtime:
            self.runtime._info = self.runtime._warn = self.logged.append

    @torch.no_grad()
    def run(self, branches: int = 1) -> tuple[list[int], list[int]]:
        """Return planned and allocated reference bytes after each step."""
        import xfuser_cocodiff

        planned, latents = [], self.small.start
        with xfuser_cocodiff.run(STEPS) as run:
            for step in range(STEPS):
                time = torch.full((self.small.batch,), 1 - step / STEPS)
                velocities = [self.small.velocity(latents, time) for _ in range(branches)]
                latents = latents - velocities[0] / STEPS
                if step == STEPS - 1:
                    planned.append(self.runtime.planned_reference_bytes)
                run.step()
                if step < STEPS - 1:
                    planned.append(self.runtime.planned_reference_bytes)
        self.latents = latents
        return planned, [report.reference_bytes for report in self.runtime.reports]


def reference_bytes(rank: int, model: str) -> tuple[list[int], list[int], list[str]]:
    runs = SmallRuns(rank, 2, model)
    runs.use()
    return *runs.run(), runs.logged


@pytest.mark.parametrize(
    ("model", "layers"),
    slow_but(
        [("Klein", 6), ("LTX2", 2)],
        [
            ("Klein", 6),
            ("Krea2", 2),
            ("MiniMaxH3Fused", 2),
            ("Wan", 2),
            ("HunyuanVideo", 4),
            ("LTX2", 2),
            ("ZImage", 4),
        ],
    ),
)
def test_planned_reference_bytes_equal_allocated_bytes(model: str, layers: int) -> None:
    for planned, allocated, logged in ranks.run(reference_bytes, 2, model):
        assert set(planned) == {allocated[-1]} and allocated[-1] > 0
        assert [line for line in logged if line.startswith(f"link references of {layers} layers: ")], logged


def run_by_file(rank: int, folder: str) -> tuple[list[dict[str, float]], str]:
    """Return errors of each layer by a schedule file, and the error of a file that lacks one layer."""
    runs = SmallRuns(rank, 2, "Wan")
    runs.use()
    runs.run()
    first, *others = runs.runtime.reports[-1].errors
    fine, rough = (dict.fromkeys(LETTERS, (bits,)) for bits in (8.0, 1.0))
    rough = {**rough, "q": (NOT_SENT,)}
    for name, layers in (("whole", [first, *others]), ("lacking", others)):
        bits = {layer: fine if layer == first else rough for layer in layers}
        Path(folder, f"{name}_{rank}.json").write_text(json.dumps(BitAllocation((0.0,), bits, 8.0).to_json()))
    runs.use(cocodiff_mode=None, cocodiff_schedule=f"@{_same(folder, 'whole', rank)}")
    runs.run()
    errors = [report.errors for report in runs.runtime.reports]
    runs.use(cocodiff_schedule=f"@{_same(folder, 'lacking', rank)}")
    with pytest.raises(ValueError, match="has no bits for the layer") as caught:
        runs.run()
    return errors, str(caught.value)


def _same(folder: str, name: str, rank: int) -> Path:
    """Return a file that all ranks read."""
    dist.barrier()
    return Path(folder, f"{name}_0.json")


def test_schedule_files_apply_on_all_ranks_and_must_have_all_layers(tmp_path: Path) -> None:
    for errors, message in ranks.run(run_by_file, 2, str(tmp_path)):
        first, *others = errors[-1]
        assert others
        assert all(errors[-1][first] < 0.1 * errors[-1][other] for other in others)
        assert repr(first) in message


def run_with_budgets(rank: int) -> list[tuple[list[int], list[str], list[int], int, torch.Tensor]]:
    """Return memory, log messages, lossless layers, bytes and latents with all memory, with 60% and with 20% of it."""
    runs, found, full_bytes = SmallRuns(rank, 2, "Klein"), [], None
    for fraction in (1, 0.6, 0.2):  # unlimited, int8 references, and some lossless layers
        # Without V-First: V as a message of its own has a flag, and the tuner's choice would show in the bytes.
        runs.use(cocodiff_memory_budget=full_bytes and full_bytes * fraction / 2**30, cocodiff_v_first="off")
        for _ in range(2):
            runs.logged.clear()
            _, sizes = runs.run()
            reports = runs.runtime.reports
            sent = sum(report.sent_bytes for report in reports)
            found.append((sizes, list(runs.logged), [report.exact_layers for report in reports], sent, runs.latents))
        full_bytes = full_bytes or sizes[-1]
    return found


def test_memory_budgets_use_int8_first_and_lossless_layers_then() -> None:
    for found in ranks.run(run_with_budgets, 2):
        sizes, _, _, full_sent, full = found[0]
        full_bytes = sizes[-1]
        for (sizes, logged, exact, sent, latents), fraction in zip(found, (1, 1, 0.6, 0.6, 0.2, 0.2), strict=True):
            assert max(sizes) <= fraction * full_bytes
            assert (exact[0] > 0) == (fraction == 0.2) and len(set(exact)) == 1
            # Warned in the second run of a session too.
            is_short = any(re.search("[1-6] of 6 layers are lossless", line) for line in logged)
            assert is_short == (fraction == 0.2), logged
            assert sent == full_sent if fraction > 0.2 else sent > 1.1 * full_sent
            assert decibels(latents, full) > 20


def run_by_free_memory(rank: int) -> tuple[list[int], float]:
    """Return the lossless layers of each step, and the PSNR to a run with all references; one rank has a fifth of the
    memory."""
    from xfuser_cocodiff.engine.compression import reference_memory
    from xfuser_cocodiff.engine.topology.device_memory import DeviceMemory

    runs = SmallRuns(rank, 2, "Klein")
    runs.use(cocodiff_v_first="off")
    _, sizes = runs.run()
    full, free = runs.latents, sizes[-1] * (1.0, 0.2)[rank]
    reference_memory.default_budget = lambda memory, *_: memory.free  # the reserve would be all of a small model
    runs.runtime._device_memory = lambda: DeviceMemory(free, 0)
    runs.run()
    return [report.exact_layers for report in runs.runtime.reports], decibels(runs.latents, full)


def test_ranks_with_different_free_memory_code_the_same_layers() -> None:
    (first, first_quality), (second, second_quality) = ranks.run(run_by_free_memory, 2)
    assert first == second and 0 < first[0] < 6
    assert first_quality > 20 and second_quality > 20


def log_messages(rank: int) -> list[list[str]]:
    """Return messages at the start, in runs of few and of many steps, and with torch.compile."""
    import logging

    import xfuser_cocodiff

    runs, logged, found = SmallRuns(rank, 2, "Wan"), [], []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("xfuser_cocodiff").addHandler(handler)

    def collect() -> None:
        found.append([line for line in logged if "mode" in line or "lossless" in line])
        logged.clear()

    runs.use()
    collect()
    runs.runtime._info = runs.runtime._warn = logged.append
    for steps in (3, 3, 20):
        with xfuser_cocodiff.run(steps) as run, torch.no_grad():
            for _ in range(3):
                runs.small.velocity(runs.small.start, torch.ones(1))
                run.step()
        collect()
    runs.use(use_torch_compile=True)
    collect()
    return found


def test_the_schedule_and_how_to_measure_its_error_are_logged_once() -> None:
    at_start, few, again, many, compiled = ranks.run(log_messages, 2)[0]
    assert [line.startswith("cocodiff: lossy: ") and "node" in line for line in at_start] == [True], at_start
    for lines, bits, steps in ((few, "2.7", 3), (many, "2", 20)):
        assert [f"bits={bits}," in line for line in lines] == [True]
        assert f"measure this model with cocodiff quality --model NAME --steps {steps} --mode 'balanced'" in lines[0]
    assert again == []
    assert not any("dB" in line for line in (*at_start, *few))  # no model was measured over three steps
    assert " dB with a small FLUX.1-dev; measure this model" in many[0]
    assert compiled == at_start  # modes work in compiled graphs too
