"""Stage A: the device and the kernels, on one rank."""

import csv
import importlib.util
import io
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch

from xfuser_cocodiff.engine import kernels
from xfuser_cocodiff.engine.kernels.quantize import GRIDS
from xfuser_cocodiff.lab.bench import kernels as bench
from xfuser_cocodiff.lab.bench.kernels import Timed
from xfuser_cocodiff.lab.one_gpu import nccl_library
from xfuser_cocodiff.lab.one_gpu.fact import Fact, NotAvailableError, Result, Setting
from xfuser_cocodiff.lab.reporting import host
from xfuser_cocodiff.lab.simulation.workloads import WORKLOADS

ROOT = Path(__file__).parents[3]
KERNEL_TESTS = "tests/engine/kernels"
CASES = (("flux.1-dev", 1024, 8), ("qwen-image", 2304, 8), ("wan2.1-14b", 720, 2))
"""Models, image sizes and degrees: about 7 MB, 33 MB and 0.8 GB of memory traffic for each kernel."""
TOY_CASES = (("flux.1-dev", 64, 24),)
KERNELS = ("encode", "decode")
PROFILED_BITS = (2, 1.6)
WARPS, VALUES = (4, 8), (1024, 2048, 4096)
"""Numbers of warps, and of values that a program of a Triton kernel handles."""
_BUILD_SECONDS = 400.0
_METRICS = {
    "registers": "launch__registers_per_thread",
    "occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "memory_bandwidth": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "local_loads": "l1tex__t_requests_pipe_lsu_mem_local_op_ld.sum",
    "local_stores": "l1tex__t_requests_pipe_lsu_mem_local_op_st.sum",
}
"""Metrics of ncu by their names in the record. Kernels access local memory only where registers spill."""


def versions(setting: Setting) -> Result:
    """Return the versions of the software and the properties of the device."""
    record: Result = {**host.header(), "cuda": torch.version.cuda, "device": setting.device.type}
    if setting.device.type != "cuda":
        return record
    found = torch.cuda.get_device_properties(0)
    properties = {"name": found.name, "capability": [found.major, found.minor], "sms": found.multi_processor_count}
    return {**record, **properties, "memory_bytes": found.total_memory, "nccl": list(torch.cuda.nccl.version())}


def ceilings(setting: Setting) -> Result:
    """Return what a copy, a matrix product and attention reach."""
    setting.require_device("a bandwidth")
    nbytes, size, tokens = 2**31, 8192, 4608
    left, right = (torch.randn(size, size, device=setting.device).bfloat16() for _ in range(2))
    query = torch.randn(1, 24, tokens, 128, device=setting.device).bfloat16()
    attend = torch.nn.functional.scaled_dot_product_attention
    calls = [
        bench.copy_of(nbytes, setting.device),
        Timed("product", lambda: torch.mm(left, right), 0),
        Timed("attention", lambda: attend(query, query, query), 0),
    ]
    seconds = {name: median(taken) for name, taken in bench.interleaved(calls, 3, setting.device).items()}
    return {
        "copy_bytes_per_second": nbytes / seconds["copy"],
        "product_flops_per_second": 2 * size**3 / seconds["product"],
        "attention_flops_per_second": 4 * 24 * 128 * tokens**2 / seconds["attention"],
    }


def kernel_tests(setting: Setting) -> Result:
    """Run the quick tests of the kernels, which take the device if there is one."""
    if not (ROOT / KERNEL_TESTS).is_dir():
        raise NotAvailableError("the tests are in a checkout of the repository, and this is an installed package")
    if missing := [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]:
        raise NotAvailableError(f"{' and '.join(missing)} not installed")
    chosen = ["-k", "chosen_backend"] if setting.is_dry_run else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, str(ROOT / KERNEL_TESTS)]
    output = setting.run_command(command, 240.0)
    counts: Result = {name: int(count) for count, name in re.findall(r"(\d+) (passed|skipped|xfailed)", output)}
    return {"passed": 0, "skipped": 0, **counts}


def kernel_times(setting: Setting) -> Result:
    """Time encode and decode at every number of bits: on the device with cold caches, and on the host."""
    rows = []
    for name, resolution, degree in setting.pick(CASES, TOY_CASES):
        for bits in GRIDS:
            timed = _kernels(setting, name, resolution, degree, bits)
            copy = bench.copy_of(timed[0].nbytes, setting.device)
            repeats = setting.pick(3, 1)
            on_device = bench.interleaved([copy, *timed], repeats, setting.device)
            on_host = bench.interleaved(timed, repeats, setting.device, on_host=True)
            for work in timed:
                speed = work.nbytes / median(on_device[work.name])
                figures: Result = {"seconds": median(on_device[work.name]), "host_seconds": median(on_host[work.name])}
                ratio: float = speed * median(on_device["copy"]) / copy.nbytes
                known = {"model": name, "resolution": resolution, "bits": bits, "kernel": work.name}
                rows.append({**known, "bytes": work.nbytes, **figures, "ratio_to_copy": ratio})
    return {"kernels": kernels.backend_for(setting.device), "rows": rows}


def _kernels(setting: Setting, name: str, resolution: int, degree: int, bits: float) -> list[Timed]:
    calls = bench.kernel_calls(WORKLOADS[name], resolution, degree, setting.device, bits)
    return [work for work in calls if work.name in KERNELS]


def profile(setting: Setting) -> Result:
    """Profile encode and decode with Nsight Compute: registers, spills, occupancy and share of memory bandwidth."""
    setting.require_device("ncu")
    if shutil.which("ncu") is None:
        raise NotAvailableError("ncu is not on PATH")
    rows = []
    for bits in PROFILED_BITS:
        command = ["ncu", "--clock-control", "none", "--csv", "--kernel-name", "regex:(encode|decode)_kernel"]
        command += ["--metrics", ",".join(_METRICS.values()), sys.executable, "-m", f"{__package__}.profiled_kernels"]
        rows += [{"bits": bits, **row} for row in parse_profile(setting.run_command([*command, str(bits)], 120.0))]
    if not rows:
        raise RuntimeError("ncu has profiled no kernel")
    return {"rows": rows}


def parse_profile(output: str) -> Iterator[Result]:
    """Yield the metrics of each kernel, of its last launch, from the CSV that ncu prints among other lines."""
    lines = [line for line in output.splitlines() if line.startswith('"')]
    found: dict[str, Result] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        kernel = "encode" if "encode" in row["Kernel Name"] else "decode"
        for name, metric in _METRICS.items():
            if row["Metric Name"] == metric:
                text = row["Metric Value"].replace(",", "")
                found.setdefault(kernel, {})[name] = float(text) if re.fullmatch(r"[\d.]+", text) else None
    for kernel, metrics in found.items():
        yield {"kernel": kernel, **dict.fromkeys(_METRICS), **metrics}


def warps(setting: Setting) -> Result:
    """Time encode and decode for numbers of warps and of values per program."""
    setting.require_device("a Triton kernel")
    if kernels.backend_for(setting.device) != kernels.TRITON:
        raise NotAvailableError("Triton's kernels are not available")
    rows, bits = [], PROFILED_BITS[0]
    for count in WARPS:
        for values in VALUES:
            with _launched_with(count, values):
                timed = _kernels(setting, *CASES[1], bits)
                seconds = bench.interleaved(timed, 3, setting.device)
            known = {"warps": count, "values": values, "bits": bits}
            rows += [{**known, "kernel": name, "seconds": median(taken)} for name, taken in seconds.items()]
    return {"rows": rows}


class _WithWarps:
    """A Triton kernel that is launched with a number of warps."""

    def __init__(self, kernel: Any, count: int) -> None:
        self._kernel, self._count = kernel, count

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return lambda *values, **options: self._kernel[grid](*values, **{**options, "num_warps": self._count})


@contextmanager
def _launched_with(count: int, values: int) -> Iterator[None]:
    from xfuser_cocodiff.engine.kernels import triton_kernels as triton

    replaced: dict[str, Any] = {
        name: _WithWarps(getattr(triton, name), count) for name in ("encode_kernel", "decode_kernel")
    }
    with mock.patch.multiple(triton, _TILE_BYTES=2 * values, **replaced):
        yield


def nccl(setting: Setting) -> Result:
    """Wait for NCCL's build, and return the library that several ranks on the GPU use."""
    nccl_library.wait_for_build(setting.folder, _BUILD_SECONDS)
    library = nccl_library.find(setting.folder)
    return {"version": list(library.version), "path": str(library.path) if library.path else "of PyTorch"}


FACTS = (
    Fact("versions", versions, 60),
    Fact("ceilings", ceilings, 60),
    Fact("kernel_tests", kernel_tests, 250),
    Fact("kernel_times", kernel_times, 150),
    Fact("profile", profile, 150),
    Fact("warps", warps, 100),
    Fact("nccl", nccl, _BUILD_SECONDS + 10),
)
