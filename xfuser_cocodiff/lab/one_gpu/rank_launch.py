"""Starts ranks that share one GPU: with NCCL if a library allows it, else with gloo and host memory."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from xfuser_cocodiff.engine.topology.launcher import SHARE_VARIABLE
from xfuser_cocodiff.lab.one_gpu import mps, nccl_library
from xfuser_cocodiff.lab.one_gpu.fact import NotAvailableError, Result
from xfuser_cocodiff.lab.one_gpu.fact_process import last_lines

NCCL, GLOO = "nccl", "gloo"
_TRIAL_CASE, _TRIAL_SECONDS = "transport", 60.0
_FILE = "transport.json"
_MAX_CTAS = 2
"""Thread blocks of each communicator: those of all ranks must run on the GPU at the same time."""


@dataclass(frozen=True)
class Transport:
    """How ranks that share one GPU communicate."""

    backend: str
    """Backend of torch.distributed."""
    environment: Mapping[str, str]
    """Environment variables of every rank."""
    library: str
    """NCCL's version and file; empty with gloo."""
    reason: str
    """Why it is gloo, which proves less: messages take neither NCCL's kernels nor its streams."""
    uses_mps: bool
    """Whether kernels of different ranks run at the same time (CUDA MPS), instead of in time slices."""


def select(folder: Path) -> Transport:
    """Return the transport of this machine; the first call tries them on two ranks.

    Args:
        folder: folder of the results, which keeps the choice.
    """
    file = folder / _FILE
    if file.exists():
        return Transport(**json.loads(file.read_text()))
    transport = _select(folder)
    file.write_text(json.dumps(asdict(transport)))
    return transport


def forget_fallback(folder: Path) -> None:
    """Forget a choice of gloo, so that NCCL is tried again: its library may have been built or named since."""
    file = folder / _FILE
    if file.exists() and json.loads(file.read_text())["backend"] == GLOO:
        file.unlink()


def _select(folder: Path) -> Transport:
    reasons = []
    try:
        library = nccl_library.find(folder)
    except NotAvailableError as error:
        return _gloo(str(error))
    for uses_mps in [True, False] if shutil.which(mps.CONTROL) else [False]:
        transport = nccl_transport(library, uses_mps)
        try:
            launch(_TRIAL_CASE, 2, {}, transport, _TRIAL_SECONDS)
        except RuntimeError as error:
            reasons.append(f"NCCL {'with' if uses_mps else 'without'} MPS: {error}")
        else:
            return transport
    return _gloo("; ".join(reasons))


def nccl_transport(library: nccl_library.NcclLibrary, uses_mps: bool) -> Transport:
    """Return the transport of a library.

    Each rank appears to be alone on its node and sees one device. So NCCL and the plugin take it for its own.
    """
    environment = {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MAX_CTAS": str(_MAX_CTAS),
        "CUDA_VISIBLE_DEVICES": _first_device(),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    if library.path:
        environment["LD_PRELOAD"] = str(library.path)
    version = ".".join(map(str, library.version))
    return Transport(NCCL, environment, f"{version}, {library.path or 'of PyTorch'}", "", uses_mps)


def dry_transport() -> Transport:
    """Return the transport of a dry run: gloo between ranks on the CPU."""
    return Transport(GLOO, {"CUDA_VISIBLE_DEVICES": ""}, "", "a dry run", False)


def _gloo(reason: str) -> Transport:
    return Transport(GLOO, {SHARE_VARIABLE: "1", "CUDA_VISIBLE_DEVICES": _first_device()}, "", reason, False)


def _first_device() -> str:
    """Return the first device that this process sees; none where it sees none."""
    if not torch.cuda.is_available():
        return ""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0] or "0"


def launch(
    case: str, count: int, arguments: Mapping[str, Any], transport: Transport, seconds: float, is_dry_run: bool = False
) -> Result:
    """Run a function of :mod:`rank_cases` on ranks that share the device, and return rank 0's result.

    Raises:
        RuntimeError: a rank failed, or they took longer than `seconds`; names the last lines of the rank's output.
    """
    with (
        tempfile.TemporaryDirectory() as scratch,
        mps.service(transport.uses_mps) as clients,
        socket.socket() as listener,
    ):
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
        listener.close()
        result = Path(scratch, "result.json")
        command = [sys.executable, "-m", "xfuser_cocodiff.lab.one_gpu.rank_process", case, str(result)]
        command += ["--arguments", json.dumps(arguments), *(["--dry-run"] if is_dry_run else [])]
        ranks = []
        for rank in range(count):
            own = {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            local = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(count)}
            environment = {**os.environ, **local, **own, **clients, **transport.environment}
            with Path(scratch, f"rank{rank}.log").open("w") as log:
                ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        try:
            _wait(ranks, scratch, seconds)
        finally:
            for process in ranks:
                process.kill()  # in the session of the caller, whose end ends them too
                process.wait()
        return json.loads(result.read_text())


def _wait(ranks: list[subprocess.Popen], scratch: str, seconds: float) -> None:
    """Wait for all ranks, or until one fails."""
    ends = time.monotonic() + seconds
    while any(statuses := [process.poll() for process in ranks]) or None in statuses:
        for rank, status in enumerate(statuses):
            if status or (status is None and time.monotonic() > ends):
                said = last_lines(Path(scratch, f"rank{rank}.log").read_text(errors="replace"))
                why = f"exit status {status}" if status else f"took longer than {seconds:.0f} s"
                raise RuntimeError(f"rank {rank}: {why}: {said}")
        time.sleep(0.1)
