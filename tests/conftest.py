"""One cache of small models for the whole session, known to every process that the tests start."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# huggingface_hub reads these once, when it is imported: before any test, and before the server that ranks fork from.
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="cocodiff-hub-")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["COCODIFF_CACHE"] = "off"  # what other processes have found is no truth to test against
for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):  # they would win over HF_HOME
    os.environ.pop(name, None)
if torch.accelerator.current_accelerator(check_available=True) is None:
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported: its kernels run on the CPU too, slowly
atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)


@pytest.fixture(scope="session")
def hub() -> Path:
    """HF_HOME with all small models in it."""
    from xfuser_cocodiff.models import hub

    folder = Path(os.environ["HF_HOME"])
    hub.write_cache(folder)
    return folder


@pytest.fixture
def uninstalled() -> Iterator[None]:
    """Without the plugin, which every process that has torch is given; its clock would hear runs beside a test's."""
    import xfuser_cocodiff

    xfuser_cocodiff.uninstall()
    yield
    xfuser_cocodiff.uninstall()
    xfuser_cocodiff.install()
