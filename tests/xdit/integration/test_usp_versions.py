"""Private names of host packages that the plugin uses, and known versions of USP."""

import importlib.util
import logging
import shutil
import sys
from pathlib import Path

import pytest
import torch

import xfuser_cocodiff
from tests import ranks
from tests.quick import slow
from xfuser_cocodiff.xdit.integration import activation
from xfuser_cocodiff.xdit.patching import symbol_lookup
from xfuser_cocodiff.xdit.session import usp_versions


def use_xfuser(folder: str) -> None:
    """Import the xfuser of a folder, with the plugin."""
    xfuser_cocodiff.uninstall()
    for name in [name for name in sys.modules if name.partition(".")[0] == "xfuser"]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    symbol_lookup.source_digest.cache_clear()
    assert xfuser_cocodiff.install()


def compare_with_stock(rank: int, folder: str) -> tuple[bool, bool, list[str]]:
    """Return whether attention equals stock with the xfuser of a folder, whether the plugin's all-to-all ran, and the
    messages."""
    use_xfuser(folder)
    from xfuser.model_executor.layers import usp

    from benchmarks import bare_runtime
    from tests.xdit.attention import test_all_to_all
    from xfuser_cocodiff.xdit.session.session import Session, active

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("xfuser_cocodiff").addHandler(handler)
    test_all_to_all.start(rank)
    test_all_to_all.use("node=2", cocodiff_mode="fast")
    tensors = [test_all_to_all.random(i, 2, 4, 6, 8, dtype=torch.float32) for i in range(3)]
    session = active()
    session.begin_run(3)
    found = []
    for _ in range(3):
        found.append(usp.USP(*tensors))
        session.end_step()
    uses_plugin = bool(session.traffic.calls)
    bare_runtime.use_session(Session())
    stock = usp.USP(*tensors)
    return all(torch.equal(each, stock) for each in found), uses_plugin, messages


STEP = "    if combine_qkv_a2a is None:\n"
RESHAPE = ".permute(2, 1, 0, 3, 4).reshape(b, h // world_size, -1, d)\n"


def other_xfuser(folder: Path, old: str, new: str, path: str = "model_executor/layers/usp.py") -> None:
    """Write a copy of xfuser with a text of one file replaced."""
    release = importlib.util.find_spec("xfuser").submodule_search_locations[0]
    shutil.copytree(release, folder / "xfuser", ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "xfuser" / path
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (STEP, f"    query = query * 2\n{STEP}"),
        slow(RESHAPE, RESHAPE.replace("\n", " * 2\n")),  # in an all-to-all
    ],
)
def test_unknown_usp_runs_unchanged_and_lossless(tmp_path: Path, old: str, new: str) -> None:
    other_xfuser(tmp_path, old, new)
    results = ranks.run(compare_with_stock, 2, str(tmp_path))
    assert [(same, uses_plugin) for same, uses_plugin, _ in results] == [(True, True)] * 2
    [line] = results[0][2]
    assert "USP is unknown" in line and "install version 0.7.0" in line and "mode 'fast' has no effect" in line


PADDING = "padding of heads that are not divisible"


def test_missing_name_costs_its_feature_only(tmp_path: Path) -> None:
    name = "_check_model_and_parallel_config"
    other_xfuser(tmp_path, name, f"{name}_now", "core/distributed/runtime_state.py")
    results = ranks.run(compare_with_stock, 2, str(tmp_path))
    assert [(same, uses_plugin) for same, uses_plugin, _ in results] == [(True, True)] * 2
    [line] = [message for message in results[0][2] if " is off: " in message]
    assert PADDING in line and name in line and "install a tested version of xfuser" in line


def configs_without_and_with_the_flag(rank: int, folder: str) -> list[str]:
    """Return what is said of a config without the flag, and the error with it."""
    use_xfuser(folder)
    from xfuser import xFuserArgs

    engine_config, _ = xFuserArgs(model="small", ulysses_degree=2).create_config()
    with pytest.raises(ValueError) as raised:
        xFuserArgs(model="small", ulysses_degree=2, use_cocodiff=True).create_config()
    return [str(engine_config.parallel_config.sp_config.cocodiff), str(raised.value)]


def test_missing_required_name_is_an_error_on_all_ranks_with_the_flag(tmp_path: Path) -> None:
    """It is detected at the start, though it is only used in a run."""
    name = "model_parallel_is_initialized"
    other_xfuser(tmp_path, f"    {name},\n", "", "core/distributed/__init__.py")
    error = f"xfuser.core.distributed.{name} does not exist; install a tested version of xfuser"
    results = ranks.run(configs_without_and_with_the_flag, 2, str(tmp_path))
    assert results == [["None", f"RuntimeError: {error}"]] * 2


def features_differ(rank: int) -> None:
    from xfuser import xFuserArgs

    if rank == 1:
        activation._installed.off[PADDING] = "xfuser.no_such_name does not exist"
    xFuserArgs(model="small", ulysses_degree=2, use_cocodiff=True).create_config()


def test_features_that_differ_between_ranks_are_an_error_on_all() -> None:
    [error] = {str(outcome) for outcome in ranks.outcomes(features_differ, 2)}
    assert f"what is off with this xfuser: rank 0: ''; rank 1: '{PADDING}'" in error


def test_installed_usp_is_known() -> None:
    assert usp_versions.is_known()
    assert activation.xdit_version() in usp_versions.DIGESTS
