"""Guided pipelines on real ranks, whose branches are coded together where they are calls one after the other."""

import os
from pathlib import Path

import pytest

from small_models import hub
from tests import ranks
from tests.engine.compression.test_joint_branches import assert_equal_ends, ends
from tests.xdit.test_approximation import LossyRun, decibels
from tests.xdit.test_traced_codecs import figures
from xfuser_cocodiff.xdit.settings.config import Overlap

pytestmark = pytest.mark.usefixtures("hub")

BITS = "bits=8"
MODELS = "Wan2.1-T2V", "Qwen-Image"
"""Models whose calls have texts of one length, and of two."""


def run_guided(rank: int, model: str, schedule: str) -> tuple[float, int, list[tuple]]:
    """Return PSNR to stock, the bytes, and the link references before the last step ends."""
    run = LossyRun(rank, 2, model)
    stock, found = run(), []
    # Without V-First: V as a message of its own has a flag, and the tuner's choice would show in the bytes.
    run.use_mode("balanced", "node=2", schedule=schedule, overlap=Overlap(v_first=False))
    runtime = run.runtime
    end_step = runtime.end_step

    def record() -> None:
        found[:] = ends(runtime)
        assert runtime.store.planned_bytes == runtime.store.nbytes or runtime.clock.step < 2
        end_step()

    runtime.end_step = record
    latents = run()
    return decibels(latents, stock), sum(report.sent_bytes for report in runtime.reports), found


@pytest.mark.slow  # one layer is quick in engine/compression/test_joint_branches
@pytest.mark.parametrize("model", MODELS)
def test_both_ends_of_a_link_agree_and_as_many_bytes_are_sent(model: str) -> None:
    hub.write_cache(Path(os.environ["HF_HOME"]), [model])
    is_joint = model == "Wan2.1-T2V"
    own, joint = (ranks.run(run_guided, 2, model, f"{BITS},joint={each}") for each in (0, 1))
    assert_equal_ends([references for _, _, references in joint], is_joint=is_joint)
    for (psnr, sent, references), (own_psnr, own_sent, _) in zip(joint, own, strict=True):
        weights = [each for _, _, each in references]
        if is_joint:
            assert weights.count(0) == weights.count(1) == len(weights) / 2
            assert sent == pytest.approx(own_sent, rel=0.05)
            assert min(psnr, own_psnr) > 40  # branches of random weights have little in common
        else:
            assert (set(weights), sent, psnr) == ({0}, own_sent, own_psnr)


def run_compiled(rank: int) -> tuple[list[tuple], list[tuple], float]:
    """Return bytes and errors by step in eager mode and in graphs, and the PSNR of one to the other."""
    run = LossyRun(rank, 2, "Wan2.1-T2V")
    run.use_mode("balanced", "node=2", schedule=f"{BITS},joint=1")
    eager, expected = run(), figures(run.runtime)
    run.runner.model.pipe.transformer.compile(backend="aot_eager")
    latents, found = run(), figures(run.runtime)
    return expected, found, decibels(latents, eager)


@pytest.mark.slow  # test_traced_codecs is the quick one
def test_graphs_code_the_same_branches_together() -> None:
    hub.write_cache(Path(os.environ["HF_HOME"]), ["Wan2.1-T2V"])
    for expected, found, psnr in ranks.run(run_compiled, 2):
        assert psnr > 40
        for (sent, exact, errors), (sent_in_graphs, exact_in_graphs, errors_in_graphs) in zip(
            expected, found, strict=True
        ):
            assert exact == exact_in_graphs
            assert sent == pytest.approx(sent_in_graphs, rel=0.005)  # V is in a message of its own, or not
            assert sorted(errors_in_graphs.values()) == pytest.approx(sorted(errors.values()), rel=0.1)
