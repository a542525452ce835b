"""What ranks that share one GPU run for a fact: functions of a dry-run flag, which return JSON values."""

import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from xfuser_cocodiff.engine.autotune import link_probe
from xfuser_cocodiff.engine.autotune.interleaved_timing import time_interleaved
from xfuser_cocodiff.engine.comm import comm_stream, groups
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.settings.ring_placement import UlyssesRingSplit
from xfuser_cocodiff.engine.topology import devices
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.lab.bench import a2a, transformer, variant
from xfuser_cocodiff.lab.bench.transformer import Shape, Step
from xfuser_cocodiff.lab.bench.variant import Variant
from xfuser_cocodiff.lab.comparison import trace
from xfuser_cocodiff.lab.one_gpu.fact import Result
from xfuser_cocodiff.xdit.launching import bare_runtime
from xfuser_cocodiff.xdit.platforms.platform import compute_device

FULL_WIDTH = Shape(width=24 * 128, depth=6, tokens=64 * 64, heads=24)
"""Two double and four single blocks of FLUX.1-dev at 1024 pixels."""
TOY = Shape(width=64, depth=3, tokens=16, heads=4)
STOCK = "stock"
FLAT, V_FIRST = "exact/flat@v_first=off", "exact/hierarchical@v_first=on"
CODED = "balanced@slow_axes=node"
STEPS, REPEATS = 8, 3
MAX_TUNED_STEPS = 40
"""Steps after which tuning must be over."""


def transport(is_dry_run: bool) -> Result:
    """Check that the ranks can communicate: each receives the sum of all."""
    group = bare_runtime.start()
    total = torch.ones(1, device=compute_device())
    dist.all_reduce(total, group=group)
    if total.item() != group.size():
        raise RuntimeError(f"an all-reduce of {group.size()} ones is {total.item():g}")
    return {"backend": dist.get_backend(group)}


def all_to_alls(is_dry_run: bool) -> Result:
    """Compare the bits of every plan with stock's, and time them."""
    group, topology = bare_runtime.start(), Topology.parse("2x2")
    sizes, repeats = ([2**10], 1) if is_dry_run else (a2a.SIZES, 5)
    record = a2a.measure(group, topology, compute_device(), bare_runtime.stock_all_to_all(), sizes, repeats)
    rows = [
        {**{name: row[name] for name in ("bytes_per_rank", "algorithm", "ratio_to_stock")}, **_median(row["seconds"])}
        for row in record["rows"]
    ]
    return {"backend": dist.get_backend(group), "rows": rows}


def flux(is_dry_run: bool) -> Result:
    """Compare steps of a full-width FLUX transformer in several modes with stock's: results and times."""
    modes = (FLAT, V_FIRST, CODED)
    step, variants = _variants(is_dry_run, "2x2", modes)
    rows: dict[str, Result] = {name: {"bit_equal": True} for name in modes}
    for _ in range(STEPS):
        for name in modes:
            output, expected = variants[name].run(step), _stock_output(variants, name, step)
            rows[name]["bit_equal"] &= torch.equal(output, expected)
            rows[name]["relative_error"] = ((output - expected).norm() / expected.norm()).item()
    times = _step_times(step, variants, is_dry_run)
    for name, seconds in times.items():
        rows.setdefault(name, {}).update(_median(seconds))
    if wrong := [name for name in (FLAT, V_FIRST) if not rows[name]["bit_equal"]]:
        raise RuntimeError(f"{', '.join(wrong)}: not bit-identical to stock; {rows}")
    return {"backend": dist.get_backend(), "rows": rows}


def overlap(is_dry_run: bool, has_priority: bool) -> Result:
    """Trace a step and return which fraction of each communication kernels on other streams hide."""
    priority = comm_stream.HIGH_PRIORITY if has_priority else 0
    with (
        mock.patch.object(comm_stream, "HIGH_PRIORITY", priority),
        mock.patch.object(groups, "HAS_HIGH_PRIORITY", has_priority),
    ):
        step, variants = _variants(is_dry_run, "node=2", (V_FIRST,))
    tried = variants[V_FIRST]
    _tune(tried, step)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace0.json.gz")
        every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        with torch.profiler.profile(experimental_config=every_thread) as profiler:
            tried.run(step)
            _synchronize()
        profiler.export_chrome_trace(str(file))
        hidden = trace.overlaps([file])
    return {
        "backend": dist.get_backend(),
        "hidden": hidden,
        **_median(_step_times(step, variants, is_dry_run)[V_FIRST]),
    }


def host_waits(is_dry_run: bool) -> Result:
    """Count the calls in coded steps for which the host waits for the device."""
    step, variants = _variants(is_dry_run, "node=2", (CODED,))
    tried = variants[CODED]
    _tune(tried, step)
    on_cuda = compute_device().type == "cuda"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if on_cuda:
            torch.cuda.set_sync_debug_mode("warn")
        for _ in range(STEPS):
            tried.run(step)
        if on_cuda:
            torch.cuda.set_sync_debug_mode("default")
    said = [str(each.message) for each in caught if "synchroniz" in str(each.message)]
    places = dict.fromkeys(f"{each.filename}:{each.lineno}" for each in caught if "synchroniz" in str(each.message))
    return {"backend": dist.get_backend(), "steps": STEPS, "host_waits": len(said), "places": list(places)[:10]}


def host_bound(is_dry_run: bool) -> Result:
    """Time steps of stock and of a coded mode, and the host time of the same steps while it runs ahead."""
    step, variants = _variants(is_dry_run, "node=2", (CODED,))
    rows = {}
    for name, tried in variants.items():
        _tune(tried, step)
        _synchronize()
        started = time.perf_counter()
        for _ in range(STEPS):
            tried.run(step)
        queued = time.perf_counter() - started
        _synchronize()
        whole = time.perf_counter() - started
        rows[name] = {"host_seconds": queued / STEPS, "step_seconds": whole / STEPS, "host_share": queued / whole}
    return {"backend": dist.get_backend(), "rows": rows}


def compiled(is_dry_run: bool, mode: str | None) -> Result:
    """Compare a compiled transformer with the plugin to one with stock: results, graphs and step times."""
    options: dict[str, Any] = {"backend": "eager"} if is_dry_run else {"mode": mode}
    torch._dynamo.reset()
    step, variants = _variants(is_dry_run, "node=2", (FLAT, V_FIRST), lambda model: torch.compile(model, **options))
    equal = {}
    for name, tried in variants.items():
        _tune(tried, step)
        equal[name] = torch.equal(tried.run(step), _stock_output(variants, name, step))
    counters = torch._dynamo.utils.counters
    times = _step_times(step, variants, is_dry_run)
    return {
        "backend": dist.get_backend(),
        "graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": dict(list(counters["graph_break"].items())[:5]),
        "rows": {name: {"bit_equal": equal[name], **_median(seconds)} for name, seconds in times.items()},
    }


CASES: dict[str, Callable[..., Result]] = {
    each.__name__: each for each in (transport, all_to_alls, flux, overlap, host_waits, host_bound, compiled)
}
"""Cases by name."""


def _variants(
    is_dry_run: bool,
    topology_text: str,
    modes: tuple[str, ...],
    compile_with: Callable[[torch.nn.Module], torch.nn.Module] | None = None,
) -> tuple[Step, dict[str, Variant]]:
    """Return a step of a FLUX transformer, and stock and some modes as variants of it."""
    group, device = bare_runtime.start(), compute_device()
    topology = Topology.parse(topology_text, group.size())
    step = transformer.step(TOY if is_dry_run else FULL_WIDTH, compile_with, device, torch.bfloat16)
    profile = link_probe.measure(Mesh.over(group, topology, device=device), device)
    split = UlyssesRingSplit(group.size(), 1)
    configs = {mode: variant.parse_mode(mode, topology, split, device.type) for mode in modes}
    return step, {STOCK: Variant(), **{mode: variant.of_mode(config, profile) for mode, config in configs.items()}}


def _tune(tried: Variant, step: Step) -> None:
    for _ in range(MAX_TUNED_STEPS):
        tried.run(step)
        if tried.session.is_tuned:
            return


def _stock_output(variants: Mapping[str, Variant], name: str, step: Step) -> torch.Tensor:
    """Return stock's output at the position of the last step of a variant."""
    bare_runtime.use_session(variants[STOCK].session)
    return step(variants[name].position)


def _step_times(step: Step, variants: Mapping[str, Variant], is_dry_run: bool) -> dict[str, list[float]]:
    works = {name: lambda tried=tried: tried.run(step) for name, tried in variants.items()}
    return time_interleaved(works, 1 if is_dry_run else REPEATS, compute_device())


def _median(seconds: list[float]) -> Result:
    return {"seconds": median(seconds), "seconds_min": min(seconds), "seconds_max": max(seconds)}


def _synchronize() -> None:
    if devices.capabilities(compute_device().type).is_asynchronous:
        torch.accelerator.synchronize()
