"""An HTTP service of Ray actors with the plugin by its variables: a soak of mixed requests."""

import base64
import importlib.util
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pytest

from tests import ranks

MISSING = [name for name in ("ray", "fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,  # test_approximation has runs of changing sizes, steps and prompts through one pipeline
    pytest.mark.alone,  # it measures memory, and Ray gives up where its own processes take more than seconds to start
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (pip install '.[serve]')"),
]
STOCK = Path(__file__).parent.parent / "stock"
MODEL = "black-forest-labs/FLUX.1-dev"
SERVICE = [sys.executable, str(STOCK / "http_service.py"), "--model_path", MODEL, "--ulysses_parallel_degree", "2"]
BALANCED = {
    **{"COCODIFF_ENABLE": "1", "COCODIFF_TOPOLOGY": "2x1"},
    **{"COCODIFF_MODE": "balanced", "COCODIFF_SLOW_AXES": "node", "COCODIFF_A2A": "hierarchical"},
    "COCODIFF_V_FIRST": "on",  # also where a request is of another size than the last one
}
KINDS = [
    {"prompt": prompt, "height": height, "width": width, "num_inference_steps": steps, "seed": seed}
    for prompt, height, width, steps, seed in (
        ("a photo of a cat", 64, 64, 4, 1),
        ("a photo of a cat", 128, 64, 6, 1),
        ("a red house on a hill", 64, 64, 4, 1),
        ("a red house on a hill", 96, 96, 3, 2),
        ("", 128, 128, 5, 3),
    )
]
REQUESTS = 100
GROWTH = 1.02
"""Of resident memory, from the second quarter of the soak to the last: allocators keep what they have had once."""
PATIENCE = 300
"""Seconds for the service to start, and for an answer."""


class Service:
    """One that listens."""

    def __init__(self, port: int, process: subprocess.Popen, log: Path) -> None:
        self._address, self._process, self._log = f"http://127.0.0.1:{port}/generate", process, log

    def ask(self, request: dict) -> tuple[bytes, list[int]]:
        """The picture's file, and how many bytes of memory each worker has."""
        posted = urllib.request.Request(
            self._address, json.dumps(request).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(posted, timeout=PATIENCE) as answer:
            found = json.load(answer)
        return base64.b64decode(found["output"]), found["resident"]

    def wait(self, port: int) -> None:
        """Until it listens; its workers may still load."""
        deadline = time.monotonic() + PATIENCE
        while self._process.poll() is None and time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.2)
        pytest.fail(f"the service does not listen:\n{self._log.read_text()[-6000:]}")


@contextmanager
def service(folder: Path, **variables: str) -> Iterator[Service]:
    folder.mkdir()
    port, master_port = ranks.free_port(), ranks.free_port()
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "RAY_ADDRESS")}
    # Paths of Ray's sockets must be short; its own folder keeps it from joining another Ray of this machine.
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as ray_folder,
        open(folder / "log", "w") as log,
    ):
        process = subprocess.Popen(
            [*SERVICE, "--port", str(port), "--master_port", str(master_port)],
            cwd=folder,
            env={**inherited, "RAY_TMPDIR": ray_folder, "RAY_USAGE_STATS_ENABLED": "0", **variables},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            listening = Service(port, process, folder / "log")
            listening.wait(port)
            yield listening
        except OSError:  # an error of HTTP, or of time
            pytest.fail(f"no answer:\n{(folder / 'log').read_text()[-6000:]}")
        finally:
            process.send_signal(signal.SIGINT)  # at which uvicorn returns, and Ray ends what it has started
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:  # an answer is under way; Ray has somebody who cleans up
                process.kill()
                process.wait()


def fresh(rank: int, kind: dict) -> bytes | None:
    """The picture of a rank that is asked nothing else."""
    from xfuser.core.distributed import init_distributed_environment

    init_distributed_environment(rank=rank, world_size=2)
    names = runpy.run_path(str(STOCK / "http_service.py"))
    generator = names["ImageGenerator"](MODEL, 2, rank, 0)
    picture, _ = generator.generate(names["GenerateRequest"](**kind))
    return picture and base64.b64decode(picture)


def alone(kind: dict, **variables: str) -> bytes:
    """The picture of fresh processes."""
    return next(filter(None, ranks.run(fresh, 2, kind, env={**BALANCED, **variables})))


def test_a_soak_of_mixed_requests(hub: Path, tmp_path: Path) -> None:
    """Memory stays as it is, and no request leaves anything behind that another one's picture would show."""
    expected = [alone(kind) for kind in KINDS]
    assert len(set(expected)) == len(KINDS)
    assert expected[-1] != alone(KINDS[-1], COCODIFF_MODE="exact")  # so something is approximated
    order = [number % len(KINDS) for number in range(REQUESTS)]
    random.Random(0).shuffle(order)
    resident = []
    with service(tmp_path / "soak", **BALANCED) as soaked:
        for number, kind in enumerate(order):
            picture, sizes = soaked.ask(KINDS[kind])
            assert picture == expected[kind], f"request {number}, {KINDS[kind]}"
            resident.append(sizes)
    (tmp_path / "resident.json").write_text(json.dumps(resident))
    quarter = REQUESTS // 4
    for rank, sizes in enumerate(zip(*resident, strict=True)):
        second, last = median(sizes[quarter : 2 * quarter]), median(sizes[-quarter:])
        assert last <= GROWTH * second, f"rank {rank}: {second / 2**20:.0f} MB, then {last / 2**20:.0f} MB"
