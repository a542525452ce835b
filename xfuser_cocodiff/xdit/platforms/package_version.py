"""The version of an installed package."""

import functools
import importlib.metadata


@functools.cache
def package_version(name: str) -> str | None:
    """Return the version of an installed package; None if it is absent or runs from a source tree."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
