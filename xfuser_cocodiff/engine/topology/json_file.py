"""Reads and writes JSON files that others may have written: bounded sizes, regular files only, atomic replacement."""

import contextlib
import json
import os
import secrets
import stat
from pathlib import Path
from typing import Any

MAX_BYTES = 16 * 2**20
"""Largest file of settings: the link profile or the tuning cache."""
MAX_RECORD_BYTES = 1024 * 2**20
"""Largest record of a measurement, which has entries for each step and layer."""


def read_bytes(file: Path, most_bytes: int = MAX_BYTES, follow_link: bool = True) -> bytes:
    """Return the content of a regular file; a pipe or device, on which a read could wait for ever, is refused.

    Args:
        file: path of the file.
        most_bytes: largest valid size.
        follow_link: whether the path may be a symbolic link; not for files that are found in a folder of many users.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no regular file, or too large.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_link else os.O_NOFOLLOW)
    with os.fdopen(os.open(file, flags), "rb") as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise ValueError("it is not a regular file")
        content = stream.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it has more than {most_bytes // 2**20} MiB")
    return content


def parse(content: bytes | str) -> Any:
    """Return the values of a JSON text.

    Raises:
        ValueError: it is not JSON, or nested too deeply.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read(file: Path, most_bytes: int = MAX_BYTES, follow_link: bool = True) -> Any:
    """Return the values in a JSON file; see :func:`read_bytes` and :func:`parse`."""
    return parse(read_bytes(file, most_bytes, follow_link))


def replace(file: Path, text: str) -> None:
    """Write a file atomically: readers see the earlier or the new content, and of several writers one wins.

    Raises:
        OSError: the file cannot be written; nothing is left behind.
    """
    partial = file.with_name(f"{file.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    # Exclusively, so that a symbolic link of that name is not followed.
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "w") as stream:
            stream.write(text)
        os.replace(partial, file)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
