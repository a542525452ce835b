"""Pipelines with their own denoising loops: runs and steps are tracked, exact mode is bit-identical to stock, and a
lossy mode compresses all steps but the first."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests import ranks
from tests.xdit.families import FAMILIES
from tests.xdit.test_approximation import decibels
from tests.xdit.test_families_coded import BITS, Coded, check_reports

if TYPE_CHECKING:
    from xfuser_cocodiff.engine.compression.step_report import StepReport

STEPS = 5


LOOPS = {
    "MiniMaxH3": Coded(2, 32),
    "MiniMaxH3Ref2VA": Coded(2, 32),
    "LingBotVideo": Coded(2, 16),
    "SD3": Coded(4, 8),
    "PixArtAlpha": Coded(2, 24),
}


@dataclass
class RunResult:
    """The results of a run on one rank."""

    outputs: list[torch.Tensor]
    """Outputs of the pipeline; empty on ranks that return none."""
    record: dict[str, Any]
    latents: torch.Tensor
    """This rank's latents after the last step."""
    is_over: bool
    axes: set[str]
    """Axes with traffic of the plugin."""
    early: list[bool]
    """For each layer signature that uses USP whether V can go first."""
    sources: set[str]
    """Projections that V comes from."""
    reports: "list[StepReport]"


def observe(rank: int, name: str, degree: int, cfg: int, folder: str) -> dict[str, RunResult]:
    """Run a pipeline on a rank: as stock, in exact mode, in a lossy mode, and as stock again."""
    from xfuser import xFuserArgs
    from xfuser.core.distributed import initialize_runtime_state

    from tests.small_pipelines import loops
    from tests.small_transformers import prepare_ranks
    from xfuser_cocodiff.tools.comparison.recorder import Recorder
    from xfuser_cocodiff.xdit.integration import activation

    prepare_ranks(rank, degree, cfg)
    activation.activate()
    activation._tracker.listeners = [recorder := Recorder(Path(folder))]

    def config(**options: Any) -> Any:
        flags = {f"cocodiff_{option}": value for option, value in options.items()}
        parallel = {"ulysses_degree": degree, "use_cfg_parallel": cfg > 1}
        return xFuserArgs(model="small", use_cocodiff=bool(options), **parallel, **flags).create_config()[0]

    small = getattr(loops, name)(config())

    def run(**options: Any) -> RunResult:
        initialize_runtime_state(small.pipeline, config(**options))
        return run_pipeline(small, recorder)

    way = {"topology": f"node=2,gpu={degree // 2}", "slow_axes": "node", "a2a": "flat", "v_first": "on"}
    return {
        "stock": run(),
        "exact": run(mode="exact", **way),
        "coded": run(mode="balanced", schedule=f"bits={BITS}", **way),
        "stock again": run(),
    }


def run_pipeline(small: Any, recorder: Any) -> RunResult:
    """Run a pipeline, and return its results."""
    from xfuser_cocodiff.xdit.session.session import active

    active().traffic.reset()
    outputs = small.run(STEPS)
    session, latents = active(), recorder.latents.clone()
    recorder.end_run()
    signatures = [signature for signature in session.layers.signatures if signature.candidates]
    return RunResult(
        outputs,
        recorder.runs[-1],
        latents,
        session.runs.newest is None,
        {axis for step in recorder.runs[-1]["steps"] for axis in step["sent_bytes"]},
        [signature.ready for signature in signatures],
        {path for signature in signatures for path in signature.structure.recipe.paths},
        session.runtime.reports if session.runtime else [],
    )


def check(name: str, degree: int, cfg: int = 1) -> None:
    wanted = LOOPS[name]
    with tempfile.TemporaryDirectory() as folder:
        for results in ranks.run(observe, degree * cfg, name, degree, cfg, folder):
            for each in results.values():
                assert each.is_over
                assert (each.record["total_steps"], len(each.record["steps"])) == (STEPS, STEPS)
                assert all(torch.isfinite(outputs).all() for outputs in each.outputs)
            for way in ("exact", "stock again"):
                assert_same(results[way], results["stock"])
            check_exact(name, results["exact"])
            check_reports(results["coded"].reports, wanted, STEPS)
            assert results["coded"].record["coded_reason"] is None
            assert not torch.equal(results["coded"].latents, results["stock"].latents)
            assert decibels(results["coded"].latents, results["stock"].latents) > wanted.decibels


def assert_same(one: RunResult, other: RunResult) -> None:
    """Check that two runs are bit-identical."""
    assert torch.equal(one.latents, other.latents)
    assert one.record["latents_sha256"] == other.record["latents_sha256"]
    assert len(one.outputs) == len(other.outputs)
    assert all(torch.equal(*pair) for pair in zip(one.outputs, other.outputs, strict=True))


def check_exact(name: str, results: RunResult) -> None:
    assert results.axes
    assert results.early and all(results.early)
    [family] = (family for family in FAMILIES if name in family.small_pipelines)
    assert results.sources <= {*family.v_first}


@pytest.mark.slow  # LingBot-Video is quick, with guidance on other ranks
@pytest.mark.parametrize(("name", "degree"), [(name, degree) for name in LOOPS for degree in (2, 4)])
def test_runs_of_a_pipelines_own_loop_are_tracked(name: str, degree: int) -> None:
    check(name, degree)


def test_runs_of_xdits_loop_are_tracked() -> None:
    """xDiT's loop for LingBot-Video has each guidance branch on its own ranks."""
    check("LingBotVideo", 2, cfg=2)
