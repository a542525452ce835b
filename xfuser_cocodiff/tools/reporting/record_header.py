"""Describes the machine and the software versions in every record."""

import datetime
import os
import platform
from typing import Any

from xfuser_cocodiff import __version__
from xfuser_cocodiff.xdit.platforms.package_version import package_version

SCHEMA = 1
"""Version of the record format."""


def header() -> dict[str, Any]:
    """Return the fields that every record begins with; the caller fills in `command`."""
    packages = ("torch", "xfuser", "diffusers")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "schema": SCHEMA,
        "command": None,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "host": {
            "cores": cores,
            "platform": platform.platform(),
            "python": platform.python_version(),
            "plugin": __version__,
            **{name: package_version(name) for name in packages},
        },
    }
