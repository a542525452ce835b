"""Codecs in xDiT's transformers on real ranks: references foretold are those held later, and schedules are kept."""

import json
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


class Held:
    """Runs of a small transformer, and what is said and held of them."""

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
        self.runtime, self.said = active().runtime, []
        if self.runtime:
            self.runtime._info = self.runtime._warn = self.said.append

    @torch.no_grad()
    def run(self, branches: int = 1) -> tuple[list[int], list[int]]:
        """What was foretold after each step, and what was held."""
        import xfuser_cocodiff

        foretold, latents = [], self.small.start
        with xfuser_cocodiff.run(STEPS) as run:
            for step in range(STEPS):
                time = torch.full((self.small.batch,), 1 - step / STEPS)
                velocities = [self.small.velocity(latents, time) for _ in range(branches)]
                latents = latents - velocities[0] / STEPS
                if step == STEPS - 1:
                    foretold.append(self.runtime.planned_reference_bytes)
                run.step()
                if step < STEPS - 1:
                    foretold.append(self.runtime.planned_reference_bytes)
        self.latents = latents
        return foretold, [report.reference_bytes for report in self.runtime.reports]


def foretell(rank: int, model: str) -> tuple[list[int], list[int], list[str]]:
    held = Held(rank, 2, model)
    held.use()
    return *held.run(), held.said


@pytest.mark.parametrize(
    ("model", "layers"),
    slow_but(
        [("Klein", 6), ("MiniMaxH3Fused", 2), ("LTX2", 2)],
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
def test_what_is_foretold_is_what_is_held(model: str, layers: int) -> None:
    for foretold, held, said in ranks.run(foretell, 2, model):
        assert set(foretold) == {held[-1]} and held[-1] > 0
        assert [line for line in said if line.startswith(f"link references of {layers} layers: ")], said


def by_a_file(rank: int, folder: str) -> tuple[list[dict[str, float]], str]:
    """Errors of each layer by a tuned schedule, and what is said of a file that lacks one."""
    held = Held(rank, 2, "Wan")
    held.use()
    held.run()
    first, *others = held.runtime.reports[-1].errors
    fine, rough = (dict.fromkeys(LETTERS, (bits,)) for bits in (8.0, 1.0))
    rough = {**rough, "q": (NOT_SENT,)}
    for name, layers in (("whole", [first, *others]), ("lacking", others)):
        bits = {layer: fine if layer == first else rough for layer in layers}
        Path(folder, f"{name}_{rank}.json").write_text(json.dumps(BitAllocation((0.0,), bits, 8.0).to_json()))
    held.use(cocodiff_mode=None, cocodiff_schedule=f"@{_same(folder, 'whole', rank)}")
    held.run()
    errors = [report.errors for report in held.runtime.reports]
    held.use(cocodiff_schedule=f"@{_same(folder, 'lacking', rank)}")
    with pytest.raises(ValueError, match="has no bits for the layer") as caught:
        held.run()
    return errors, str(caught.value)


def _same(folder: str, name: str, rank: int) -> Path:
    """A file that all ranks read."""
    dist.barrier()
    return Path(folder, f"{name}_0.json")


def test_real_ranks_go_by_a_tuned_schedule_and_refuse_one_of_other_layers_alike(tmp_path: Path) -> None:
    for errors, said in ranks.run(by_a_file, 2, str(tmp_path)):
        first, *others = errors[-1]
        assert others
        assert all(errors[-1][first] < 0.1 * errors[-1][other] for other in others)
        assert repr(first) in said


def on_a_budget(rank: int) -> list[tuple[list[int], list[str], list[int], int, torch.Tensor]]:
    held, found, whole = Held(rank, 2, "Klein"), [], None
    for share in (1, 0.6, 0.2):  # all there is, in 8 bits, and for some layers
        # V alone is a message more, with a flag of its own: a trial's choice would show in the bytes.
        held.use(cocodiff_memory_budget=whole and whole * share / 2**30, cocodiff_v_first="off")
        for _ in range(2):
            held.said.clear()
            _, sizes = held.run()
            reports = held.runtime.reports
            sent = sum(report.sent_bytes for report in reports)
            found.append((sizes, list(held.said), [report.exact_layers for report in reports], sent, held.latents))
        whole = whole or sizes[-1]
    return found


def test_the_budget_decides_by_all_layers_and_costs_little_quality_and_then_bytes() -> None:
    for found in ranks.run(on_a_budget, 2):
        sizes, _, _, at_first, full = found[0]
        whole = sizes[-1]
        for (sizes, said, exact, sent, latents), share in zip(found, (1, 1, 0.6, 0.6, 0.2, 0.2), strict=True):
            assert max(sizes) <= share * whole
            assert (exact[0] > 0) == (share == 0.2) and len(set(exact)) == 1
            # In the second run of a session too.
            assert any("of 6 layers are lossless" in line for line in said) == (share == 0.2), said
            assert sent == at_first if share > 0.2 else sent > 1.1 * at_first
            assert decibels(latents, full) > 20


def speak(rank: int) -> list[list[str]]:
    """What is said at the start, in runs of few and of many steps, and under compile."""
    import logging

    import xfuser_cocodiff

    held, said, found = Held(rank, 2, "Wan"), [], []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("xfuser_cocodiff").addHandler(handler)

    def heard() -> list[str]:
        found.append([line for line in said if "mode" in line or "exactly" in line])
        said.clear()

    held.use()
    heard()
    held.runtime._info = held.runtime._warn = said.append
    for steps in (3, 3, 20):
        with xfuser_cocodiff.run(steps) as run, torch.no_grad():
            for _ in range(3):
                held.small.velocity(held.small.start, torch.ones(1))
                run.step()
        heard()
    held.use(use_torch_compile=True)
    heard()
    return found


def test_what_codes_and_how_to_measure_its_error_is_said_when_something_is_coded() -> None:
    at_start, few, again, many, compiled = ranks.run(speak, 2)[0]
    assert [line.startswith("cocodiff: lossy: ") and "node" in line for line in at_start] == [True], at_start
    for lines, bits, steps in ((few, 4, 3), (many, 2, 20)):
        assert [f"bits={bits}," in line for line in lines] == [True]
        assert f"measure it with cocodiff quality --model NAME --steps {steps} --mode 'balanced'" in lines[0]
    assert again == []
    assert not any("dB" in line for line in (*at_start, *few, *many))  # no figure of another model
    assert compiled == at_start  # where modes do what they do elsewhere
