"""Selection of tests, and a cache of small models that all processes of a test session share."""

import atexit
import fcntl
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from tests import interpreter, ranks

# huggingface_hub reads these once, at its import: set them before any test and before the server that ranks fork from.
if "PYTEST_XDIST_WORKER" not in os.environ:  # else the main process has set it
    os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="cocodiff-hub-")
    atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["COCODIFF_CACHE"] = "off"  # no tuning results of other processes
for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):  # they would override HF_HOME
    os.environ.pop(name, None)
if torch.accelerator.current_accelerator(check_available=True) is None:
    os.environ["TRITON_INTERPRET"] = "1"  # read at the import of Triton: interpret its kernels on the CPU
    if importlib.util.find_spec("triton"):
        interpreter.patch_language_once_per_launch()

# On AMX, oneDNN's attention in bfloat16 may have other bits for a part of the queries, and exact mode then keeps heads.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

torch.set_num_threads(1)  # other tests run on the other cores
settings.register_profile("cocodiff", deadline=None)  # no test may depend on how loaded the machine is
settings.load_profile("cocodiff")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run slow tests too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, which ranks then share"))
    if config.getoption("all") or any("::" in name for name in config.args):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    items[:] = [item for item in items if item not in slow]
    config.hook.pytest_deselected(items=slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """Run tests marked `alone` without others on the machine, and quick tests with a shorter timeout."""
    ranks.TIMEOUT = ranks.SLOW_TIMEOUT if item.get_closest_marker("slow") else ranks.QUICK_TIMEOUT
    alone = item.get_closest_marker("alone") is not None
    with Path(__file__).open() as machine, Path(__file__).with_name("quick.py").open() as queue:
        # A test that waits to be alone blocks later ones; otherwise these would keep the machine busy for ever.
        fcntl.flock(queue, fcntl.LOCK_EX)
        fcntl.flock(machine, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(queue, fcntl.LOCK_UN)
        return (yield)


@pytest.fixture(scope="session")
def hub() -> Path:
    """HF_HOME with small models of the paper's families; tests of other families add theirs."""
    from small_models import hub

    folder = Path(os.environ["HF_HOME"])
    done = folder / "written"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            hub.write_cache(folder, ["FLUX.1-dev", "FLUX.2-dev", "SD3.5", "Qwen-Image"])
            done.touch()
    return folder


@pytest.fixture
def uninstalled() -> Iterator[None]:
    """Uninstall the plugin, which is installed with torch: its run tracker would see the runs of a test twice."""
    import xfuser_cocodiff

    xfuser_cocodiff.uninstall()
    yield
    xfuser_cocodiff.uninstall()
    xfuser_cocodiff.install()
