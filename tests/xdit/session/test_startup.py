"""Starts of sessions: one for an engine, without codecs in lossless mode."""

import contextlib
import sys
from types import SimpleNamespace
from unittest import mock

import pytest

from benchmarks import bare_runtime
from tests import ranks
from tests.xdit.attention.test_overlap import start
from tests.xdit.test_pipelines import MODELS, SIZE, Run
from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.compression.value_format import ValueFormat
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.session import startup
from xfuser_cocodiff.xdit.session.session import active
from xfuser_cocodiff.xdit.settings.config import CocoDiffConfig


def count_starts(rank: int) -> list[int]:
    """Return the starts so far after an engine is initialized twice, after it ran, and with other options."""
    from xfuser import xFuserArgs
    from xfuser.core.distributed import initialize_runtime_state

    _, transformer, step = start(rank, depth=1)
    counts = []
    with mock.patch.object(startup, "create_session", side_effect=startup.create_session) as created:

        def initialize(config: object) -> None:
            initialize_runtime_state(SimpleNamespace(transformer=transformer), config)
            counts.append(created.call_count)

        first, other = (
            xFuserArgs(model="tiny", ulysses_degree=2, use_cocodiff=True, cocodiff_cache="off").create_config()[0]
            for _ in range(2)
        )
        initialize(first)
        initialize(first)
        active().begin_run(1)
        step()
        initialize(first)
        initialize(other)
    return counts


def test_an_engine_that_is_initialized_twice_starts_one_session() -> None:
    assert ranks.run(count_starts, 2) == [[1, 1, 2, 3]] * 2


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


def start_lossless(rank: int) -> list[str]:
    """Start a lossless session and run steps, with all kernels trapped; return the modules of kernels here."""
    group, _, step = start(rank, depth=2)
    with contextlib.ExitStack() as traps:
        for name in ("_kernels", "_module", "backend_for"):
            traps.enter_context(mock.patch.object(kernels, name, side_effect=AssertionError(name)))
        config = CocoDiffConfig(topology=Topology.parse("2x1", 2), mode="exact")
        bare_runtime.use_session(startup.create_session(group, config, values=ValueFormat()))
        active().begin_run(3)
        for _ in range(3):
            step()
            active().end_step()
    assert active().traffic.calls
    backends = ("kernels.triton_", "codec_check", "codec_probe", "compression.loopback")
    own = [name for name in sys.modules if name.startswith("xfuser_cocodiff.")]
    return [name for name in own if any(part in name for part in backends)]


def test_lossless_runs_launch_no_kernel_of_the_codec() -> None:
    ranks.run(start_lossless, 2)


@pytest.mark.slow  # two interpreters; the test above traps the kernels
def test_lossless_runs_import_no_kernel_of_the_codec() -> None:
    assert ranks.run(start_lossless, 2, spawn=True) == [[]] * 2
