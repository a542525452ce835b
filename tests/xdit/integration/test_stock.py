"""Without --use_cocodiff xDiT is stock, and no code of the plugin runs in its steps."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

import xfuser_cocodiff
from tests import ranks

PACKAGE = Path(xfuser_cocodiff.__file__).parent
TOPOLOGY = {"topology": "node=2", "v_first": "on"}

SELECTION = {"_get_attention_function", "backend_name", "runtime_state"}
"""Selection of a kernel that xDiT lacks on CPUs; it returns before attention starts."""


def run(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, set[str]]:
    """Return the result of a call, and the functions of the plugin that it ran."""
    ours: set[str] = set()

    def record(frame: Any, *_: Any) -> None:
        if PACKAGE in Path(frame.f_code.co_filename).parents:
            ours.add(frame.f_code.co_name)

    sys.setprofile(record)
    try:
        return call(), ours
    finally:
        sys.setprofile(None)


def alternate_stock_and_plugin(rank: int) -> None:
    from xfuser.model_executor.layers import usp

    from tests.small_transformers import base as small
    from tests.small_transformers.videos import Wan
    from xfuser_cocodiff.xdit.session.session import active

    script = sys.modules["script"] = ModuleType("script")
    script.USP = original = usp.USP
    assert [each.__code__.co_filename for each in (usp.USP, usp._ft_c_input_all_to_all)] == [usp.__file__] * 2
    assert not hasattr(original, "__wrapped__")
    small.prepare_ranks(rank, 2)
    transformer = Wan()
    small.use(transformer, 2)
    stock, ours = run(transformer.denoise)
    assert ours <= SELECTION
    small.use(transformer, 2, mode="exact", **TOPOLOGY)
    exact, ours = run(transformer.denoise)
    assert usp.USP is script.USP is not original
    assert {"node"} == set(active().traffic.sent_bytes) and any("USP" in function for function in ours)
    assert torch.equal(exact, stock)
    small.use(transformer, 2, mode="balanced", **TOPOLOGY)
    with xfuser_cocodiff.run(2) as steps:
        coded = transformer.denoise(2, steps.step)
    assert not torch.equal(coded, stock)
    small.use(transformer, 2)
    assert torch.equal(transformer.denoise(), stock)
    modules = transformer.transformer.modules()
    processors = [vars(module.processor) for module in modules if hasattr(module, "processor")]
    holders = [values for values in processors if any(value is usp.USP for value in values.values())]
    assert holders
    xfuser_cocodiff.uninstall()
    assert usp.USP is script.USP is original
    assert all(any(value is original for value in values.values()) for values in holders)
    assert active().mesh is None


def test_no_code_of_the_plugin_runs_before_activation() -> None:
    """Activation also reaches a transformer that was built before and holds xDiT's attention as an attribute."""
    ranks.run(alternate_stock_and_plugin, 2)


def make_configs(rank: int) -> list[str]:
    """Return how errors are printed: without the flag, and after a bad option."""
    from xfuser import xFuserArgs

    from xfuser_cocodiff.xdit.platforms import platform

    with mock.patch.object(platform, "detect_topology", side_effect=AssertionError) as detected:
        xFuserArgs(model="small", ulysses_degree=2).create_config()
    assert not detected.called  # it asks drivers
    found = [sys.excepthook.__module__]
    with pytest.raises(ValueError, match="--cocodiff_mode: 'lossy' is not valid"):
        xFuserArgs(model="small", ulysses_degree=2, use_cocodiff=True, cocodiff_mode="lossy").create_config()
    return [*found, sys.excepthook.__module__]


def test_options_neither_ask_drivers_without_the_flag_nor_change_how_errors_are_printed() -> None:
    for before, after in ranks.run(make_configs, 2):
        assert before == after and not before.startswith("xfuser_cocodiff")
