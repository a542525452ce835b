"""Facts about one rank: versions, checks of the kernels, and their times."""

import csv
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import torch

from benchmarks.one_gpu import kernel_calls as bench
from benchmarks.one_gpu.setting import Row, Setting
from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.compression import codec_check
from xfuser_cocodiff.tools.simulation.workloads import WORKLOADS

CASES = (("flux.1-dev", 1024, 8), ("qwen-image", 2304, 8))
"""Models, image sizes and degrees: about 7 and 33 MB of memory traffic for each kernel."""
TOY_CASES = (("flux.1-dev", 64, 24),)
BITS = (2, 1.6)
REPEATS = 5
_CACHES, _MAX_BUFFERS = 4, 64
"""Size of all buffers of a graph over that of the L2 cache, and most of them."""
_METRICS = (
    *("launch__registers_per_thread", "sm__warps_active.avg.pct_of_peak_sustained_active"),
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    *(f"l1tex__t_requests_pipe_lsu_mem_local_op_{kind}.sum" for kind in ("ld", "st")),
)
"""Metrics of ncu: registers, occupancy, memory bandwidth, and accesses of local memory, which are spilled registers."""


def versions(setting: Setting) -> Iterator[Row]:
    """Yield what `cocodiff env` knows of the machine."""
    file = setting.folder / "env.json"
    done = subprocess.run([sys.executable, "-m", "xfuser_cocodiff.cli", "env", "--json", str(file)])
    yield {"env_status": done.returncode, "env": json.loads(file.read_text())}


def self_check(setting: Setting, mode: str) -> Iterator[Row]:
    """Check the kernels of a mode, as the start of a session does, which also compiles them."""
    backend = kernels.backend_for(setting.device)
    started = time.perf_counter()
    failure = codec_check.failure(backend, mode, None, setting.device, tokens=setting.pick(512, 16))
    yield {"mode": mode, "kernels": backend, "failure": failure, "check_seconds": time.perf_counter() - started}
    if failure:
        raise RuntimeError(failure)


def sanitize(setting: Setting, tool: str) -> Iterator[Row]:
    """Encode and decode three tensors under a tool of compute-sanitizer, without PyTorch's pools of memory."""
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    output = _run(["compute-sanitizer", "--tool", tool], tokens=512, heads=4)
    summaries = [line.strip("= ") for line in output.splitlines() if "SUMMARY" in line]
    yield {"tool": tool, "summary": summaries}
    if not summaries or not all("SUMMARY: 0 " in line for line in summaries):
        raise RuntimeError(output)


def profile(setting: Setting) -> Iterator[Row]:
    """Yield what Nsight Compute measures of encode and decode of three tensors of FLUX.1-dev at 1024 pixels."""
    command = ["ncu", "--clock-control", "none", "--csv", "--kernel-name", "regex:(encode|decode)_kernel"]
    output = _run([*command, "--metrics", ",".join(_METRICS)], tokens=4608, heads=24)
    table = [line for line in output.splitlines() if line.startswith('"')]
    for row in csv.DictReader(table):
        yield {name: row[name] for name in ("ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value")}
    if not table:
        raise RuntimeError(output)


def _run(tool: Sequence[str], tokens: int, heads: int) -> str:
    """Encode and decode three tensors under a tool of the CUDA toolkit, and return its output."""
    command = [*tool, sys.executable, "-m", f"{__package__}.three_tensors", str(tokens), str(heads)]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout


def kernel_times(setting: Setting) -> Iterator[Row]:
    """Yield the times of encode and decode: on the device with cold caches, and on the host."""
    for name, resolution, degree in setting.pick(CASES, TOY_CASES):
        for bits in BITS:
            sizes = WORKLOADS[name], resolution, degree, setting.device, bits
            nbytes, first = bench.kernel_calls(*sizes)
            cold = _CACHES * torch.cuda.get_device_properties(0).L2_cache_size
            buffers = min(_MAX_BUFFERS, math.ceil(cold / nbytes))
            timed = [first, *(bench.kernel_calls(*sizes)[1] for _ in range(1, buffers))]
            copy_seconds = _device_seconds([bench.copy_of(nbytes, setting.device) for _ in range(buffers)])
            for kernel in first:
                calls = [each[kernel] for each in timed]
                seconds = _device_seconds(calls)
                yield {
                    **{"model": name, "resolution": resolution, "bits": bits, "kernel": kernel},
                    **{"bytes": nbytes, "buffers": buffers, "device_seconds": seconds},
                    **{"ratio_to_copy": copy_seconds / seconds, **call_seconds(calls)},
                }


def _device_seconds(calls: Sequence[Callable[[], object]]) -> float:
    """Return the device time of a call, in a graph of all of them, whose launches take no host time."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for call in calls:
            call()  # compiles kernels, and creates what is kept for the stream
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    seconds = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / len(calls))
    return median(seconds)


def call_seconds(calls: Sequence[Callable[[], object]]) -> Row:
    """Return the time of a call on the host, which finds the device idle before the first one, and until the device has
    ended the last one."""
    queued, ended = [], []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for call in calls:
            call()
        queued.append((time.perf_counter() - started) / len(calls))
        torch.cuda.synchronize()
        ended.append((time.perf_counter() - started) / len(calls))
    return {"host_seconds": median(queued), "total_seconds": median(ended)}
