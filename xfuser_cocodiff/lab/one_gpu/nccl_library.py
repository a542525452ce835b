"""NCCL for several ranks on one GPU: 2.30 or later, of PyTorch, of the machine, or built from a source archive.

PyTorch's own NCCL was 2.28 up to PyTorch 2.11, which refuses two ranks on one device. A newer library is compatible and
takes its place with LD_PRELOAD.
"""

import ctypes
import ctypes.util
import json
import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from xfuser_cocodiff.lab.one_gpu.fact import NotAvailableError
from xfuser_cocodiff.lab.one_gpu.fact_process import kill, last_lines

SOURCE_VARIABLE = "COCODIFF_NCCL"
"""Environment variable: a source archive of NCCL, or a libnccl.so.2."""
LEAST_VERSION = (2, 30, 0)
"""First version that takes several ranks on one GPU."""
_BUILD_FOLDER, _LOG, _PID_FILE = "nccl-build", "nccl-build.log", "process.json"
_FUNCTIONS = "AllGather * *|AllReduce * *|Broadcast * *|SendRecv"
"""Kernels that are built: those of the plugin, of xDiT and of PyTorch's barriers. All of them take much longer."""


@dataclass(frozen=True)
class NcclLibrary:
    """A library that takes several ranks on one GPU."""

    version: tuple[int, ...]
    path: Path | None
    """File to preload; None for PyTorch's own."""


def find(folder: Path) -> NcclLibrary:
    """Return the library that ranks use: PyTorch's own if it is new enough, else one that is built, given or installed.

    Args:
        folder: folder of the results, beside which a source archive is built.

    Raises:
        NotAvailableError: there is none; names what was found.
    """
    if not torch.cuda.is_available():
        raise NotAvailableError("NCCL needs a GPU")
    own, found = torch.cuda.nccl.version(), []
    if own >= LEAST_VERSION:
        return NcclLibrary(own, None)
    for path in _candidates(folder):
        version = version_of(path)
        if version and version >= LEAST_VERSION:
            return NcclLibrary(version, path)
        found.append(f"{path} is {_text(version) if version else 'no library'}")
    raise NotAvailableError(
        f"several ranks on one GPU need NCCL {_text(LEAST_VERSION)}: PyTorch has {_text(own)}; "
        f"{'; '.join(found) or f'{SOURCE_VARIABLE} names no other'}"
    )


def _candidates(folder: Path) -> Iterator[Path]:
    yield from folder.glob(f"{_BUILD_FOLDER}/*/build/lib/libnccl.so.2")
    given = os.environ.get(SOURCE_VARIABLE, "")
    if given and not _is_archive(given):
        yield Path(given)
    for packages in (Path(torch.__file__).parent.parent, *map(Path, os.environ.get("PYTHONPATH", "").split(":"))):
        yield from packages.glob("nvidia/nccl/lib/libnccl.so.2")
    if name := ctypes.util.find_library("nccl"):
        yield Path(name)


def version_of(path: Path) -> tuple[int, ...] | None:
    """Return the version of a library; None if it cannot be loaded."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL(str(path)).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return None
    major, rest = divmod(number.value, 10_000)
    return major, *divmod(rest, 100)


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _is_archive(name: str) -> bool:
    return ".tar" in name or name.endswith(".tgz")


def start_build(folder: Path) -> None:
    """Start to build the source archive that the environment names, for this GPU; without effect if there is none.

    The build outlives this process: :func:`wait_for_build` waits for it.
    """
    archive, target = os.environ.get(SOURCE_VARIABLE, ""), folder / _BUILD_FOLDER
    if not (_is_archive(archive) and Path(archive).is_file()) or any(target.glob("*/build/lib/libnccl.so.2")):
        return
    if shutil.which("nvcc") is None or not torch.cuda.is_available() or _running_build(target):
        return
    shutil.rmtree(target, ignore_errors=True)
    safe: dict[str, Any] = (
        {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    )  # from Python 3.11.4 and 3.10.12
    with tarfile.open(archive) as source:
        source.extractall(target, **safe)
    [root] = [path for path in target.iterdir() if path.is_dir()]
    with (folder / _LOG).open("w") as log:
        build = subprocess.Popen(_make(root), stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    (target / _PID_FILE).write_text(json.dumps([build.pid, _start_time(build.pid)]))


def _make(root: Path) -> list[str]:
    major, minor = torch.cuda.get_device_capability()
    nvcc = Path(shutil.which("nvcc") or "nvcc").resolve()
    number = f"{major}{minor}"
    return [
        *("make", "-C", str(root), f"-j{os.cpu_count()}", "src.build", f"CUDA_HOME={nvcc.parent.parent}"),
        *(f"NVCC_GENCODE=-gencode=arch=compute_{number},code=sm_{number}", f"ONLY_FUNCS={_FUNCTIONS}"),
    ]


def wait_for_build(folder: Path, seconds: float) -> None:
    """Wait for a build that :func:`start_build` started, if there is one, and end it after `seconds`.

    Raises:
        RuntimeError: it failed or took too long; names the last lines of its log.
    """
    target = folder / _BUILD_FOLDER
    if not (target / _PID_FILE).exists():
        return
    ends = time.monotonic() + seconds
    while pid := _running_build(target):
        if time.monotonic() > ends:
            kill(pid)
            raise RuntimeError(f"the build took longer than {seconds:.0f} s")
        time.sleep(0.5)
    if not any(target.glob("*/build/lib/libnccl.so.2")):
        raise RuntimeError(f"the build failed: {last_lines((folder / _LOG).read_text())}")


def _running_build(target: Path) -> int | None:
    """Return the process of a build, which another stage may have started; None if none runs.

    Its start time tells it from a later process with the same ID.
    """
    try:
        pid, start_time = json.loads((target / _PID_FILE).read_text())
    except (OSError, ValueError):
        return None
    return pid if start_time is not None and _start_time(pid) == start_time else None


def _start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the machine did; None if it does not run."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else int(fields[18])
