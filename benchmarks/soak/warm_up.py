"""Prepares the process that ranks are forked from: small models, and imports that take seconds."""

import importlib
import os
from pathlib import Path

_ENVIRONMENT = {
    # More than one thread would not survive the fork.
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # every connection would warn that its address has no host name
}
"""Variables that libraries read when they are loaded, so that ranks cannot set them."""
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def set_environment(models: Path) -> None:
    """Set the variables that libraries read when they are imported; call this before torch is imported.

    Args:
        models: folder of the small models, for HF_HOME.
    """
    os.environ.update(_ENVIRONMENT)
    for name in [name for name in os.environ if name.startswith("COCODIFF_")]:
        os.environ.pop(name)  # requests say what they run with
    os.environ.update(HF_HOME=str(models), HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="", LOG_LEVEL="warning")


def prepare() -> None:
    """Import xDiT with the plugin."""
    import xfuser_cocodiff

    xfuser_cocodiff.install()
    before = {name: os.environ.get(name) for name in _LAUNCHER_VARIABLES}
    for name in ("xfuser.runner", "xfuser_cocodiff.xdit.session.startup", "benchmarks.soak.rank_worker"):
        importlib.import_module(name)
    importlib.import_module("xfuser_cocodiff.xdit.session.usp_versions").is_known()  # whose result is cached
    for name, value in before.items():  # xDiT's runner sets them for a single rank
        if value is None:
            os.environ.pop(name, None)
