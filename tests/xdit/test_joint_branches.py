"""Guided pipelines on real ranks, whose branches are coded together: in calls one after the other, and in one batch."""

import pytest

from tests import ranks
from tests.engine.compression.test_joint_branches import assert_equal_ends, ends
from tests.xdit.test_approximation import LossyRun, decibels
from tests.xdit.test_traced_codecs import compile_transformer, figures
from xfuser_cocodiff.xdit.settings.config import Overlap

pytestmark = pytest.mark.usefixtures("hub")

BITS = "bits=8"


def run_guided(rank: int, model: str, schedule: str, *more: str) -> tuple[float, int, list[tuple], set[str]]:
    """Return PSNR to stock, the bytes, the link references before the last step ends and the names of their tensors."""
    run = LossyRun(rank, 2, model, *more)
    stock, found, names = run(), [], set()
    # Without V-First: V as a message of its own has a flag, and the tuner's choice would show in the bytes.
    run.use_mode("balanced", "node=2", schedule=schedule, overlap=Overlap(v_first=False))
    runtime = run.runtime
    end_step = runtime.end_step

    def record() -> None:
        found[:] = ends(runtime)
        names.update(name for state in runtime.store.states.values() for name, _ in state.link_states)
        assert runtime.store.planned_bytes == runtime.store.nbytes or runtime.clock.step < 2
        end_step()

    runtime.end_step = record
    latents = run()
    return decibels(latents, stock), sum(report.sent_bytes for report in runtime.reports), found, names


@pytest.mark.slow  # one layer is quick in engine/compression/test_joint_branches
@pytest.mark.parametrize("model", ["SD3.5", "Qwen-Image"])
def test_both_ends_of_a_link_agree_and_as_many_bytes_are_sent(model: str) -> None:
    """The two prompts of Qwen-Image have different lengths, so that each branch is coded by itself."""
    own, joint = (ranks.run(run_guided, 2, model, f"{BITS},joint={each}") for each in (0, 1))
    assert_equal_ends([references for _, _, references, _ in joint], is_joint=model == "SD3.5")
    for (psnr, sent, references, names), (own_psnr, own_sent, _, own_names) in zip(joint, own, strict=True):
        weights = [each for _, _, each in references]
        if model == "SD3.5":
            assert names == own_names | {f"{name}1" for name in own_names}
            assert weights.count(0) == weights.count(1) == len(weights) / 2
            assert sent == pytest.approx(own_sent, rel=0.05)
            assert min(psnr, own_psnr) > 40  # branches of random weights have little in common
        else:
            assert (set(weights), sent, psnr, names) == ({0}, own_sent, own_psnr, own_names)


def run_compiled(rank: int, model: str, how: str) -> tuple[list[tuple], list[tuple], float]:
    """Return bytes and errors by step in eager mode and in graphs, and the PSNR of one to the other."""
    run = LossyRun(rank, 2, model)
    run.use_mode("balanced", "node=2", schedule=f"{BITS},joint=1")
    eager, expected = run(), figures(run)
    compile_transformer(run, how)
    latents, found = run(), figures(run)
    return expected, found, decibels(latents, eager)


@pytest.mark.slow  # test_traced_codecs is the quick one
@pytest.mark.parametrize(("model", "how"), [("SD3.5", "whole"), ("Qwen-Image", "blocks")])
def test_graphs_code_the_same_branches_together(model: str, how: str) -> None:
    for expected, found, psnr in ranks.run(run_compiled, 2, model, how):
        assert psnr > 40
        for (sent, exact, errors), (sent_in_graphs, exact_in_graphs, errors_in_graphs) in zip(
            expected, found, strict=True
        ):
            assert exact == exact_in_graphs
            assert sent == pytest.approx(sent_in_graphs, rel=0.005)  # V is in a message of its own, or not
            assert sorted(errors_in_graphs.values()) == pytest.approx(sorted(errors.values()), rel=0.1)
