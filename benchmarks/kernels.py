"""Kernels of the codecs relative to a copy on the same device and to a transformer layer.

Also measures the host time per layer: at very few tokens, all-to-alls take nothing but launches. On an accelerator,
times of device and host are measured apart, and caches are flushed before each call.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.utils import benchmark

from benchmarks import command_line
from xfuser_cocodiff.cli.output import write_json
from xfuser_cocodiff.engine.attention.ulysses import UlyssesAttention
from xfuser_cocodiff.engine.codec import kernels
from xfuser_cocodiff.engine.codec.codec import Codec
from xfuser_cocodiff.engine.codec.rows import GAIN_STEPS, Int8Rows, MessagePart, Prediction
from xfuser_cocodiff.engine.comm.comm_stream import CommStream
from xfuser_cocodiff.engine.comm.head_group import HeadGroup
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.policy import PlanPolicy
from xfuser_cocodiff.engine.comm.stages import PendingStage, Stages
from xfuser_cocodiff.engine.compression import modes
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.layer_codecs import CodecStats, LayerCodecs
from xfuser_cocodiff.engine.compression.mode_names import EXACT
from xfuser_cocodiff.engine.compression.step_codecs import StepCodecs
from xfuser_cocodiff.engine.compression.step_errors import StepErrors
from xfuser_cocodiff.engine.topology import devices
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.lab.reporting import host
from xfuser_cocodiff.lab.simulation.workloads import WORKLOADS, Workload
from xfuser_cocodiff.xdit.platforms.platform import compute_device

CASES = (("flux.1-dev", 1024), ("qwen-image", 2304))
"""Models and image sizes in pixels."""
DEGREES = (2, 4, 6, 8, 12, 24)
"""Ulysses degrees that divide the heads of both models, on two nodes."""
NODES = 2
"""Size of the slow axis."""
BITS = 2
"""Bits per value, and fraction of tokens sent, as in the lossy modes."""
CODED = ("balanced", "fast")
"""Modes whose codecs are timed."""
STEPS = 50
"""Number of steps of the run whose later layers are timed."""
SEED = 0
HOST_TOKENS = 2
"""Tokens per rank for host time: so few that launches dominate."""


@dataclass(frozen=True)
class Timed:
    """A call to time."""

    name: str
    """Name of the kernel or mode."""
    call: Callable[[], object]
    """The call."""
    nbytes: int
    """Minimum memory traffic: each tensor read or written once."""


def measure(device: torch.device, degree: int, repeats: int, cases: Sequence[tuple[str, int]] = CASES) -> dict:
    """Time each kernel, a copy of as many bytes, and the transformer layer around them.

    Args:
        device: device to measure.
        degree: Ulysses degree, on NODES nodes.
        repeats: number of interleaved measurements of each.
        cases: names of workloads and image sizes in pixels.

    Returns:
        The record. `rows`: seconds, bandwidth and its ratio to the copy's by kernel, each a list of repeats. `layers`:
        for each case and mode the device time that compression adds to the projections and attention of a layer.
        `host_calls`: for each mode the host time of a layer's all-to-alls.
    """
    rows, layers = [], []
    for name, resolution in cases:
        workload = WORKLOADS[name]
        timed_kernels = kernel_calls(workload, resolution, degree, device)
        copy, layer = copy_of(timed_kernels[-1].nbytes, device), layer_calls(workload, resolution, degree, device)
        seconds = interleaved([copy, *timed_kernels, *layer], repeats, device)
        for work in timed_kernels:
            speeds = [work.nbytes / taken for taken in seconds[work.name]]
            ratios = [speed * base / copy.nbytes for speed, base in zip(speeds, seconds["copy"], strict=True)]
            row = {"model": name, "resolution": resolution, "kernel": work.name, "bytes": work.nbytes}
            rows.append({**row, "seconds": seconds[work.name], "bytes_per_second": speeds, "ratio_to_copy": ratios})
        for mode in CODED:
            turns = zip(seconds[mode], seconds[EXACT], seconds["layer"], strict=True)
            shares = [(encoded - exact) / whole for encoded, exact, whole in turns]
            known = {"model": name, "resolution": resolution, "mode": mode}
            layers.append({**known, "layer_seconds": seconds["layer"], "share": shares})
    first = cases[0][0]
    calls = interleaved(_by_modes(WORKLOADS[first], HOST_TOKENS, degree, device), repeats, device, on_host=True)
    record = {**host.header(), "device": _name(device), "kernels": kernels.backend_for(device), "degree": degree}
    on_host = [{"model": first, "mode": mode, "seconds": taken} for mode, taken in calls.items()]
    return {**record, "rows": rows, "layers": layers, "host_calls": on_host}


def show(record: dict[str, Any]) -> None:
    """Print a record as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"kernels ({record['kernels']}) on {record['device']}, degree {record['degree']}")
    for column in ("model", "pixels", "kernel", "MB", "us", "GB/s", "relative to copy"):
        table.add_column(column)
    for row in record["rows"]:
        seconds, speed, ratio = (median(row[key]) for key in ("seconds", "bytes_per_second", "ratio_to_copy"))
        low, high = min(row["ratio_to_copy"]), max(row["ratio_to_copy"])
        table.add_row(
            *(row["model"], str(row["resolution"]), row["kernel"], f"{row['bytes'] / 1e6:.1f}", f"{1e6 * seconds:.0f}"),
            *(f"{speed / 1e9:.1f}", f"{ratio:.2f} ({low:.2f}-{high:.2f})"),
        )
    console = Console(highlight=False)
    console.print(table)
    for layer in record["layers"]:
        console.print(
            f"{layer['model']} at {layer['resolution']}: compression in mode {layer['mode']} adds "
            f"{median(layer['share']):.1%} ({min(layer['share']):.1%} to {max(layer['share']):.1%}) to a layer's "
            f"projections and attention ({1e3 * median(layer['layer_seconds']):.2f} ms)"
        )
    for calls in record["host_calls"]:
        low, middle, high = (1e3 * pick(calls["seconds"]) for pick in (min, median, max))
        console.print(
            f"{calls['model']}: host time of a layer's all-to-alls in mode {calls['mode']}: {middle:.2f} ms "
            f"({low:.2f} to {high:.2f}), with {HOST_TOKENS} tokens per rank and no communication"
        )


def kernel_calls(
    workload: Workload, resolution: int, degree: int, device: torch.device, bits: float = BITS
) -> list[Timed]:
    """Return the kernel calls for the part of one of Q, K, V and O that a rank sends along the slow axis."""
    torch.manual_seed(SEED)
    groups, heads = degree // NODES, workload.heads // degree
    tokens, dim = _tokens(workload, resolution, degree), workload.head_dim
    # Strides as after the all-to-all along fast axes: tokens outside of heads.
    values = torch.randn(NODES, groups, tokens, heads, dim, device=device).bfloat16().transpose(2, 3)
    shape = (NODES - 1, groups, heads, tokens, dim)
    reference = torch.randn(shape, device=device)
    gains = torch.full((len(reference),), GAIN_STEPS // 2, dtype=torch.uint8, device=device)
    previous = Int8Rows.of(reference + 0.1 * torch.randn_like(reference))
    prediction = Prediction(Int8Rows.of(reference), previous, gains)
    size = Codec(bits, predicts=True).payload_bytes(shape, values.dtype)
    payload = torch.zeros(NODES, size, dtype=torch.uint8, device=device)
    base = torch.randn_like(reference).to(values.dtype)
    memory = Int8Rows(*map(torch.empty_like, previous))
    part = MessagePart(values, prediction, bits, payload, memory, range(1))
    energies = torch.empty(1, 2, device=device)
    target = part._replace(values=torch.empty_like(values))
    # Values, their base, both references and the new one.
    of_values, of_reference = base.nbytes, sum(tensor.nbytes for tensor in previous)
    moved = of_values + 3 * of_reference + (NODES - 1) * payload.shape[1]

    with_base = part._replace(base=base), target._replace(base=base)
    return [
        Timed("encode", lambda: kernels.encode([part], energies), moved),
        Timed("encode with a base", lambda: kernels.encode([with_base[0]], energies), moved + of_values),
        Timed("decode with a base", lambda: kernels.decode([with_base[1]]), moved + of_values),
        Timed("decode", lambda: kernels.decode([target]), moved),
    ]


def _tokens(workload: Workload, resolution: int, degree: int) -> int:
    """Return the tokens per rank."""
    return -(-workload.tokens(resolution) // degree)


def copy_of(nbytes: int, device: torch.device) -> Timed:
    """Return a copy that reads and writes `nbytes` together."""
    source = torch.empty(nbytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Timed("copy", lambda: target.copy_(source), nbytes)


def _layer(workload: Workload, resolution: int, degree: int, device: torch.device) -> Callable[[], object]:
    """Return a call of a layer's compute: projections of the rank's tokens, attention of its heads over all tokens."""
    tokens = workload.tokens(resolution)
    own, heads = _tokens(workload, resolution, degree), workload.heads // degree
    q = torch.randn(1, heads, tokens, workload.head_dim, device=device).bfloat16()
    hidden = torch.randn(own, workload.width, device=device).bfloat16()
    square = torch.randn(workload.width, workload.width, device=device).bfloat16()
    projections = round(workload.projections)

    def layer() -> None:
        for _ in range(projections):
            torch.mm(hidden, square)
        torch.nn.functional.scaled_dot_product_attention(q, q, q)

    return layer


class _NoCommunication(Stages):
    """Stages that return what was sent, so that only device and host work is timed."""

    def start(self, buffer: torch.Tensor, plan: Plan, number: int) -> PendingStage:
        dim = plan.dims[number]
        sent = (buffer.movedim(dim, 0) if dim else buffer).contiguous()
        return lambda: sent.movedim(0, dim)

    def start_gather(self, block: torch.Tensor, plan: Plan, number: int) -> PendingStage:
        ranks = plan.shape[plan.dims[number]]
        return lambda: block.expand(ranks, *block.shape)


def _local_mesh(comm_stream: CommStream, **axes: int) -> Mesh:
    """Return a mesh over some axes that does not communicate."""
    topology = Topology.named(**axes)
    plan = Plan.hierarchical(topology)
    return Mesh(
        topology,
        _NoCommunication(dict.fromkeys(plan.stages), comm_stream.device),
        PlanPolicy(lambda nbytes: plan),
        comm_stream,
    )


def layer_calls(workload: Workload, resolution: int, degree: int, device: torch.device) -> list[Timed]:
    """Return the computation of a layer, "layer", and its all-to-alls in each mode, without communication."""
    layer = Timed("layer", _layer(workload, resolution, degree, device), 0)
    return [layer, *_by_modes(workload, _tokens(workload, resolution, degree), degree, device)]


def _by_modes(workload: Workload, tokens: int, degree: int, device: torch.device) -> list[Timed]:
    """Return the all-to-alls of a layer, in each mode."""
    return [Timed(mode, _layer_all_to_alls(workload, tokens, degree, device, mode), 0) for mode in (EXACT, *CODED)]


def _layer_all_to_alls(
    workload: Workload, tokens: int, degree: int, device: torch.device, mode: str
) -> Callable[[], object]:
    """Return a call of a layer's communication, as in the later steps of a long run in a mode.

    Coded layers gather K and V between the nodes, as a run on two nodes does.
    """
    torch.manual_seed(SEED)
    comm_stream, near = CommStream.on(device), {"gpu": degree // NODES} if degree > NODES else {}
    mesh, fast = _local_mesh(comm_stream, node=NODES, **near), _local_mesh(comm_stream, **near) if near else None
    partition = AxisPartition(NODES, mesh.topology.size // NODES, 0, _local_mesh(comm_stream, node=NODES), fast)
    query, key, value = (
        torch.randn(1, workload.heads, tokens, workload.head_dim, device=device).bfloat16() for _ in range(3)
    )
    link_states: dict = {}
    errors, schedule = StepErrors(), modes.PRESETS.get(mode)
    codecs = schedule.codecs(STEPS - 1, STEPS, BITS if schedule.error else None) if schedule else None

    def call() -> None:
        layer_codecs, gather = None, partition if codecs else None
        if codecs:
            errors.start_readout()
            step = StepCodecs(codecs=codecs)
            layer_codecs = LayerCodecs(partition, step, link_states, CodecStats(), errors, gathers_kv=True)
        UlyssesAttention(mesh, layer_codecs=layer_codecs, gather=gather).run(query, key, value, _attend)

    call()  # the keyframe that creates the references
    return call


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_group: HeadGroup) -> torch.Tensor:
    """Return O of an attention that takes no time."""
    return query


def interleaved(
    calls: Sequence[Timed], repeats: int, device: torch.device, on_host: bool = False
) -> dict[str, list[float]]:
    """Return the seconds of each call: those of the device, or of the host, which are the same on a CPU."""
    timers = {work.name: _timer(work.call, device, on_host) for work in calls}
    seconds: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(repeats):
        for name, timed in timers.items():
            seconds[name].append(timed())
    return seconds


def _timer(call: Callable[[], object], device: torch.device, on_host: bool) -> Callable[[], float]:
    """Return a function that times a call once more."""
    if devices.capabilities(device.type).is_asynchronous and not on_host:
        from triton.testing import do_bench  # which flushes the cache before each call

        return lambda: do_bench(call, return_mode="median") / 1e3
    timer = benchmark.Timer("call()", globals={"call": call})
    return lambda: timer.blocked_autorange(min_run_time=0.1).median


def _name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    return getattr(torch, device.type).get_device_name()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure on one device, and return the exit status."""
    parser = command_line.new_parser("kernels", "Kernels of the codecs on one device, and a layer's host time.")
    command_line.add_json(parser)
    parser.add_argument("--degree", type=int, default=8, choices=DEGREES, help="Ulysses degree (%(default)s)")
    parser.add_argument("--kernels", default="auto", choices=kernels.CHOICES, help="(%(default)s)")
    parser.add_argument("--repeats", type=command_line.at_least(1), default=5, help="rounds (%(default)s)")
    return command_line.run(parser, _measure_on_device, argv)


def _measure_on_device(options: argparse.Namespace) -> int:
    kernels.use(options.kernels)
    record = measure(compute_device(), options.degree, options.repeats)
    show(record)
    write_json(options, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
