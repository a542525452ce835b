"""NVIDIA's multi-process service (MPS), which runs kernels of several ranks concurrently."""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
_SECONDS = 20


@contextlib.contextmanager
def service(is_used: bool) -> Iterator[dict[str, str]]:
    """Run the service in a context; yields the environment variables of its clients.

    Raises:
        RuntimeError: it does not start.
    """
    if not is_used:
        yield {}
        return
    folder = Path(tempfile.mkdtemp(prefix=_prefix(os.getsid(0))))
    try:
        try:
            _call(folder, "-d")
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"MPS does not start: {error}") from None
        yield _environment(folder)
    finally:
        _quit(folder)


def end(leader: int) -> None:
    """End services that a session has started, given the process that leads it: as daemons, they outlive it."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_prefix(leader)}*"):
        _quit(folder)


def _prefix(leader: int) -> str:
    return f"cocodiff-mps-{leader}-"


def _environment(folder: Path) -> dict[str, str]:
    return {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}


def _quit(folder: Path) -> None:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        _call(folder, text=b"quit\n")
    shutil.rmtree(folder, ignore_errors=True)


def _call(folder: Path, *arguments: str, text: bytes = b"") -> None:
    subprocess.run(
        [CONTROL, *arguments],
        env={**os.environ, **_environment(folder)},
        input=text,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=_SECONDS,
    )
