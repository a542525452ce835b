"""Loops that pipelines have of their own: the plugin sees their runs and steps, exact it has stock's bits, and a mode
that approximates codes every step but the first."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests import ranks
from tests.quick import slow_but
from tests.xdit.test_approximation import decibels
from tests.xdit.test_families_coded import BITS, Coded, check_reports
from xfuser_cocodiff.lab.models.families import FAMILIES

if TYPE_CHECKING:
    from xfuser_cocodiff.engine.compression.runtime import StepReport

STEPS = 5


LOOPS = {
    "MiniMaxH3": Coded(2, 32),
    "MiniMaxH3Ref2VA": Coded(2, 32),
    "LingBotVideo": Coded(2, 16),
    "SD3": Coded(4, 8),
    "PixArtAlpha": Coded(2, 24),
}


@dataclass
class Seen:
    """What a run left on one rank."""

    made: list[torch.Tensor]
    """By the pipeline: nothing, on ranks that return nothing."""
    record: dict[str, Any]
    latents: torch.Tensor
    """At the last step, of this rank."""
    is_over: bool
    axes: set[str]
    """Along which the plugin moved something."""
    early: list[bool]
    """For each kind of layer that goes through USP whether V can go first."""
    sources: set[str]
    """Projections that V comes from."""
    reports: "list[StepReport]"


def observe(rank: int, name: str, degree: int, cfg: int, folder: str) -> dict[str, Seen]:
    """On a rank: a pipeline as stock runs it, with the plugin exact, and approximating."""
    from xfuser import xFuserArgs
    from xfuser.core.distributed import initialize_runtime_state

    from tests.small_pipelines import loops
    from tests.small_transformers import prepare_ranks
    from xfuser_cocodiff.lab.comparison.recorder import Recorder
    from xfuser_cocodiff.xdit.integration import activation

    prepare_ranks(rank, degree, cfg)
    activation.activate()
    activation._tracker.listeners = [recorder := Recorder(Path(folder))]

    def config(**options: Any) -> Any:
        flags = {f"cocodiff_{option}": value for option, value in options.items()}
        parallel = {"ulysses_degree": degree, "use_cfg_parallel": cfg > 1}
        return xFuserArgs(model="small", use_cocodiff=bool(options), **parallel, **flags).create_config()[0]

    small = getattr(loops, name)(config())

    def run(**options: Any) -> Seen:
        initialize_runtime_state(small.pipeline, config(**options))
        return see(small, recorder)

    way = {"topology": f"node=2,gpu={degree // 2}", "slow_axes": "node", "a2a": "flat", "v_first": "on"}
    return {
        "stock": run(),
        "exact": run(mode="exact", **way),
        "coded": run(mode="balanced", schedule=f"bits={BITS},bits_o={BITS}", **way),
        "stock again": run(),
    }


def see(small: Any, recorder: Any) -> Seen:
    """Run a pipeline."""
    from xfuser_cocodiff.xdit.session.session import active

    active().traffic.reset()
    made = small.run(STEPS)
    session, latents = active(), recorder.latents.clone()
    recorder.end_run()
    signatures = [signature for signature in session.layers.signatures if signature.candidates]
    return Seen(
        made,
        recorder.runs[-1],
        latents,
        session.runs.newest is None,
        {axis for step in recorder.runs[-1]["steps"] for axis in step["sent_bytes"]},
        [signature.ready for signature in signatures],
        {path for signature in signatures for path in signature.recipe.paths},
        session.runtime.reports if session.runtime else [],
    )


def check(name: str, degree: int, cfg: int = 1) -> None:
    wanted = LOOPS[name]
    with tempfile.TemporaryDirectory() as folder:
        for seen in ranks.run(observe, degree * cfg, name, degree, cfg, folder):
            for each in seen.values():
                assert each.is_over
                assert (each.record["total_steps"], len(each.record["steps"])) == (STEPS, STEPS)
                assert all(torch.isfinite(made).all() for made in each.made)
            for way in ("exact", "stock again"):
                assert_same(seen[way], seen["stock"])
            check_exact(name, seen["exact"])
            check_reports(seen["coded"].reports, wanted, STEPS)
            assert seen["coded"].record["coded_reason"] is None
            assert not torch.equal(seen["coded"].latents, seen["stock"].latents)
            assert decibels(seen["coded"].latents, seen["stock"].latents) > wanted.decibels


def assert_same(one: Seen, other: Seen) -> None:
    """Bit for bit."""
    assert torch.equal(one.latents, other.latents)
    assert one.record["latents_sha256"] == other.record["latents_sha256"]
    assert len(one.made) == len(other.made)
    assert all(torch.equal(*pair) for pair in zip(one.made, other.made, strict=True))


def check_exact(name: str, seen: Seen) -> None:
    assert seen.axes
    assert seen.early and all(seen.early)
    [family] = (family for family in FAMILIES if name in family.loops)
    assert seen.sources <= {*family.v_first}


@pytest.mark.parametrize(
    ("name", "degree"),
    slow_but(
        [("MiniMaxH3", 2), ("PixArtAlpha", 4)],  # LingBot-Video is quick with guidance on other ranks
        [(name, degree) for name in LOOPS for degree in (2, 4)],
    ),
)
def test_a_loop_of_its_own_has_runs(name: str, degree: int) -> None:
    check(name, degree)


def test_a_loop_of_xdits_has_runs() -> None:
    """LingBot-Video's two branches of guidance are on ranks of their own, in a loop that xDiT has for that."""
    check("LingBotVideo", 2, cfg=2)
