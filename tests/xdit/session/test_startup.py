"""Starts of sessions: one for an engine, without codecs in lossless mode."""

import contextlib
from unittest import mock

import pytest

from benchmarks import bare_runtime
from tests import ranks
from tests.xdit.attention.test_overlap import start
from tests.xdit.test_pipelines import MODELS, SIZE, Run
from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.compression.head_format import HeadFormat
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.session import startup
from xfuser_cocodiff.xdit.session.session import active
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig


def starts_of_runner(rank: int) -> int:
    """Return the starts of a runner whose pipeline has a wrapper of xDiT."""
    arguments = ["--model", "SD3.5", "--ulysses_degree", "2", *SIZE, *MODELS["SD3.5"], "--use_cocodiff"]
    with mock.patch.object(startup, "create_session", side_effect=startup.create_session) as created:
        run = Run(rank, 2, [*arguments, "--cocodiff_cache", "off"])
    run()
    assert active().traffic.calls
    return created.call_count


@pytest.mark.usefixtures("hub")
def test_a_runner_with_a_pipeline_wrapper_starts_one_session() -> None:
    assert ranks.run(starts_of_runner, 2) == [1] * 2


def start_lossless(rank: int) -> None:
    """Start a lossless session and run steps, with all kernels trapped."""
    group, _, step = start(rank, depth=2)
    with contextlib.ExitStack() as traps:
        for name in ("_kernels", "_module", "backend_for"):
            traps.enter_context(mock.patch.object(kernels, name, side_effect=AssertionError(name)))
        config = CocoDiffConfig(topology=Topology.parse("2x1", 2), mode="exact")
        bare_runtime.use_session(startup.create_session(group, config, values=HeadFormat()))
        active().begin_run(3)
        for _ in range(3):
            step()
            active().end_step()
    assert active().traffic.calls


def test_lossless_runs_launch_no_kernel_of_the_codec() -> None:
    ranks.run(start_lossless, 2)
