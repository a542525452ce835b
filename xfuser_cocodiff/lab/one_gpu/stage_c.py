"""Stage C: what the host adds, and compiled graphs."""

from statistics import median

from xfuser_cocodiff.lab.bench import kernels as bench
from xfuser_cocodiff.lab.one_gpu.fact import Fact, Result, Setting
from xfuser_cocodiff.lab.simulation.workloads import WORKLOADS

CASES = (("flux.1-dev", 1024), ("qwen-image", 2304))
DEGREES = (2, 4, 8, 12)
"""Divisors of the 24 heads of both models."""
COMPILE_MODES = (None, "reduce-overhead")


def layers(setting: Setting) -> Result:
    """Time one layer and its all-to-alls in each mode, without communication: on the device and on the host."""
    rows = []
    for name, resolution in setting.pick(CASES, CASES[:1]):
        for degree in setting.pick(DEGREES, DEGREES[-1:]):
            size, repeats = setting.pick((resolution, 3), (64, 1))
            calls = bench.layer_calls(WORKLOADS[name], size, degree, setting.device)
            on_device = bench.interleaved(calls, repeats, setting.device)
            on_host = bench.interleaved(calls, repeats, setting.device, on_host=True)
            for work in calls:
                figures = {"seconds": median(on_device[work.name]), "host_seconds": median(on_host[work.name])}
                rows.append({"model": name, "resolution": size, "degree": degree, "part": work.name, **figures})
    return {"rows": rows}


def host_waits(setting: Setting) -> Result:
    """Count host waits in coded steps."""
    setting.require_device("a host wait")
    return setting.launch_ranks("host_waits", 2)


def compiled(setting: Setting) -> Result:
    """Compare compiled transformers with stock's, in two modes of torch.compile."""
    return {str(mode): setting.launch_ranks("compiled", 2, mode=mode) for mode in setting.pick(COMPILE_MODES, (None,))}


def host_bound(setting: Setting) -> Result:
    """Find out whether the host bounds coded steps at 1024 pixels."""
    return setting.launch_ranks("host_bound", 2)


FACTS = (
    Fact("layers", layers, 140),
    Fact("host_waits", host_waits, 60),
    Fact("host_bound", host_bound, 80),
    Fact("compiled", compiled, 300),
)
