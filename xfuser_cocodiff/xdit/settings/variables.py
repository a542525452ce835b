"""Environment variables that are not options."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from xfuser_cocodiff.engine.topology import launcher

RECORD_VARIABLE = "COCODIFF_RECORD"
"""Folder in which every rank writes a record of its runs, for `cocodiff compare`."""
LOG_LEVEL_VARIABLE = "COCODIFF_LOG_LEVEL"
"""Least severe level of the messages that are logged, one of LOG_LEVELS."""
LOG_LEVELS = ("debug", "info", "warning", "error")
OTHER_VARIABLES = (
    *(RECORD_VARIABLE, LOG_LEVEL_VARIABLE),
    *(launcher.CLUSTER_VARIABLE, "COCODIFF_DISABLE"),
    *("COCODIFF_PYTHON", "COCODIFF_SYSTEM_TORCH", "COCODIFF_TORCH", "COCODIFF_TORCH_INDEX"),
)
"""All of them: those of records, logs, the entry point, the emulated cluster and the scripts."""


def collectives_are_synchronous(environment: Mapping[str, str]) -> bool:
    """Return whether oneCCL blocks in every collective (CCL_OP_SYNC), so that no communication is hidden."""
    return environment.get("CCL_OP_SYNC", "").strip().lower() in ("1", "true", "yes", "on", "y", "t")


def check_variables(environment: Mapping[str, str]) -> None:
    """Check the variables that are not options, before a run depends on them.

    Raises:
        ValueError: names the variable, its value and the valid set.
    """
    level = environment.get(LOG_LEVEL_VARIABLE)
    if level and level.lower() not in LOG_LEVELS:
        raise ValueError(f"{LOG_LEVEL_VARIABLE}: {level!r} is not valid; valid are {', '.join(LOG_LEVELS)}")
    folder = environment.get(RECORD_VARIABLE)
    if not folder:
        return
    with contextlib.suppress(OSError):
        Path(folder).mkdir(parents=True, exist_ok=True)
    if not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
        raise ValueError(f"{RECORD_VARIABLE}: {folder!r} is not valid; valid are folders that can be written to")
