"""Guided pipelines on real ranks, whose branches are coded together: in calls one after the other, and in one batch."""

import pytest

from tests import ranks
from tests.engine.compression.test_joint_branches import assert_equal_ends, ends
from tests.xdit.test_approximation import LossyRun, decibels

pytestmark = pytest.mark.usefixtures("hub")

BITS = "bits=8,bits_q=8,bits_o=8"


def run_guided(rank: int, model: str, schedule: str, *more: str) -> tuple[float, int, list[tuple], set[str]]:
    """Return PSNR to stock, the bytes, the link references before the last step ends and the names of their tensors."""
    run = LossyRun(rank, 2, model, *more)
    stock, found, names = run(), [], set()
    run.use_mode("balanced", "node=2", schedule=schedule)
    runtime = run.runtime
    end_step = runtime.end_step

    def record() -> None:
        found[:] = ends(runtime)
        names.update(name for state in runtime._states.values() for name, _ in state.link_states)
        assert runtime.planned_reference_bytes == runtime.reference_bytes or runtime.step < 2
        end_step()

    runtime.end_step = record
    latents = run()
    return decibels(latents, stock), sum(report.sent_bytes for report in runtime.reports), found, names


# The two prompts of Qwen-Image have different lengths.
@pytest.mark.parametrize(("model", "weight"), [("SD3.5", 1.25), ("Qwen-Image", 1)])
def test_both_ends_of_a_link_agree_and_as_many_bytes_are_sent(model: str, weight: float) -> None:
    own, joint = (ranks.run(run_guided, 2, model, f"{BITS},joint={each}") for each in (0, weight))
    assert_equal_ends([references for _, _, references, _ in joint])
    for (psnr, sent, references, names), (own_psnr, own_sent, _, own_names) in zip(joint, own, strict=True):
        assert names == own_names | ({f"{name}1" for name in own_names} if model == "SD3.5" else set())
        weights = [each for _, _, each in references]
        assert weights.count(0) == weights.count(weight) == len(weights) / 2
        assert sent == pytest.approx(own_sent, rel=0.05)
        assert psnr > own_psnr - 6 > 40  # branches of random weights have little in common
