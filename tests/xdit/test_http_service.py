"""Requests to an HTTP service of Ray actors, with the plugin enabled by variables."""

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

import pytest

from tests import ranks

MISSING = [name for name in ("ray", "fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,  # test_approximation has runs of changing sizes, steps and prompts through one pipeline
    pytest.mark.alone,  # Ray fails if its own processes take more than seconds to start
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (pip install '.[serve]')"),
]
STOCK = Path(__file__).parent.parent / "stock"
MODEL = "black-forest-labs/FLUX.1-dev"
SERVICE = [sys.executable, str(STOCK / "http_service.py"), "--model_path", MODEL, "--ulysses_parallel_degree", "2"]
BALANCED = {
    **{"COCODIFF_ENABLE": "1", "COCODIFF_TOPOLOGY": "2x1"},
    **{"COCODIFF_MODE": "balanced", "COCODIFF_SLOW_AXES": "node", "COCODIFF_A2A": "hierarchical"},
    "COCODIFF_V_FIRST": "on",  # also if a request has another size than the last one
}
KINDS = [
    {"prompt": prompt, "height": height, "width": width, "num_inference_steps": steps, "seed": seed}
    for prompt, height, width, steps, seed in (
        ("a photo of a cat", 64, 64, 4, 1),
        ("a photo of a cat", 128, 64, 6, 1),
        ("a red house on a hill", 64, 64, 4, 1),
        ("", 128, 128, 5, 3),
    )
]
REQUESTS = 20
CANCELLED_EVERY = 5
"""Requests between two that are cancelled while they run."""
TIMEOUT = 300
"""Longest time in seconds until the service listens, and until a response."""


class Service:
    """Running HTTP service."""

    def __init__(self, port: int, process: subprocess.Popen, log: Path) -> None:
        self._address, self._process, self._log = f"http://127.0.0.1:{port}/generate", process, log
        self._port = port

    def generate(self, request: dict) -> bytes:
        """Return the picture file."""
        post = urllib.request.Request(self._address, json.dumps(request).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(post, timeout=TIMEOUT) as response:
            return base64.b64decode(json.load(response)["output"])

    def cancel(self, request: dict, seconds: float) -> None:
        """Send a request, and close the connection before there is a response."""
        body = json.dumps(request).encode()
        head = "POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", self._port), TIMEOUT) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            time.sleep(seconds)

    def wait(self, port: int) -> None:
        """Wait until the service listens; its workers may still be loading."""
        deadline = time.monotonic() + TIMEOUT
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
    # With an empty CUDA_VISIBLE_DEVICES the plugin gives Ray no virtual GPUs, for which the workers wait for ever.
    left_out = "RANK", "RAY_ADDRESS", "CUDA_VISIBLE_DEVICES"
    inherited = {name: value for name, value in os.environ.items() if name not in left_out}
    # Paths of Ray's sockets must be short; a private folder keeps it from joining another cluster.
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
        except OSError:  # an HTTP error or a timeout
            pytest.fail(f"no response:\n{(folder / 'log').read_text()[-6000:]}")
        finally:
            process.send_signal(signal.SIGINT)  # uvicorn returns, and Ray ends its processes
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:  # a request is running; Ray cleans up
                process.kill()
                process.wait()


def single_request(rank: int, kind: dict) -> bytes | None:
    """Return the picture of a rank for a single request; None on ranks without it."""
    from xfuser.core.distributed import init_distributed_environment

    init_distributed_environment(rank=rank, world_size=2)
    names = runpy.run_path(str(STOCK / "http_service.py"))
    generator = names["ImageGenerator"](MODEL, 2, rank, 0)
    picture, _ = generator.generate(names["GenerateRequest"](**kind))
    return picture and base64.b64decode(picture)


def picture_of(kind: dict, **variables: str) -> bytes:
    """Return the picture of a single request to new processes."""
    return next(filter(None, ranks.run(single_request, 2, kind, env={**BALANCED, **variables})))


def test_mixed_requests_equal_single_ones(hub: Path, tmp_path: Path) -> None:
    """No request, also one that its client cancels, affects the picture of another."""
    expected = [picture_of(kind) for kind in KINDS]
    assert len(set(expected)) == len(KINDS)
    assert expected[-1] != picture_of(KINDS[-1], COCODIFF_MODE="exact")  # the mode is lossy
    order = [number % len(KINDS) for number in range(REQUESTS)]
    random.Random(0).shuffle(order)
    with service(tmp_path / "mixed", **BALANCED) as running:
        for number, kind in enumerate(order):
            if number % CANCELLED_EVERY == 0:
                running.cancel(KINDS[kind], 0.2)
            assert running.generate(KINDS[kind]) == expected[kind], f"request {number}, {KINDS[kind]}"
