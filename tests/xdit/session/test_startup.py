"""Starts of sessions: one for an engine, without codecs in lossless mode."""

import contextlib
import sys
from unittest import mock

import pytest

from tests import ranks
from tests.xdit.attention.test_overlap import start
from xfuser_cocodiff.engine import kernels
from xfuser_cocodiff.engine.compression.value_format import ValueFormat
from xfuser_cocodiff.engine.settings.config import CocoDiffConfig
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.launching import bare_runtime
from xfuser_cocodiff.xdit.session import startup
from xfuser_cocodiff.xdit.session.session import active


def start_lossless(rank: int) -> list[str]:
    """Start a lossless session and run steps, with all kernels trapped; return the modules of kernels here."""
    group, _, step = start(rank, depth=2)
    with contextlib.ExitStack() as traps:
        for name in ("_kernels", "_module", "backend_for"):
            traps.enter_context(mock.patch.object(kernels, name, side_effect=AssertionError(name)))
        config = CocoDiffConfig(topology=Topology.parse("2x1", 2), mode="exact")
        bare_runtime.use_session(startup.create_session(group, config, values=ValueFormat()))
        active().runs.begin(3)
        for _ in range(3):
            step()
            active().runs.end_step()
    assert active().traffic.calls
    backends = ("kernels.triton_", "codec_check", "codec_probe", "compression.loopback")
    own = [name for name in sys.modules if name.startswith("xfuser_cocodiff.")]
    return [name for name in own if any(part in name for part in backends)]


def test_lossless_runs_launch_no_kernel_of_the_codec() -> None:
    ranks.run(start_lossless, 2)


@pytest.mark.slow  # two interpreters; the test above traps the kernels
def test_lossless_runs_import_no_kernel_of_the_codec() -> None:
    assert ranks.run(start_lossless, 2, spawn=True) == [[]] * 2
