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


def read(file: Path, most_bytes: int = MAX_BYTES, follow_link: bool = True) -> Any:
    """Return the values in a JSON file. A pipe or device, on which a read could wait for ever, is refused.

    Args:
        file: path of the file.
        most_bytes: largest valid size.
        follow_link: whether the path may be a symbolic link; not for files that are found in a folder of many users.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no regular file, too large, not JSON, or nested too deeply.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_link else os.O_NOFOLLOW)
    with os.fdopen(os.open(file, flags), "rb") as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise ValueError("it is not a regular file")
        content = stream.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it has more than {most_bytes // 2**20} MiB")
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


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
