"""Kernels against a copy on the same device: how near they come to its bandwidth, what they are beside a layer, and
what a layer's exchanges take of the host, which does nothing but call where values are few."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.utils import benchmark

from xfuser_cocodiff.engine import kernels
from xfuser_cocodiff.engine.attention.ulysses import ulysses_attention
from xfuser_cocodiff.engine.comm.comm_stream import CommStream
from xfuser_cocodiff.engine.comm.mesh import Mesh
from xfuser_cocodiff.engine.comm.policy import PlanPolicy
from xfuser_cocodiff.engine.comm.stages import PendingStage, Stages
from xfuser_cocodiff.engine.compression import modes
from xfuser_cocodiff.engine.compression.axis_partition import AxisPartition
from xfuser_cocodiff.engine.compression.codecs import Codec
from xfuser_cocodiff.engine.compression.layer_codecs import CodecStats, LayerCodecs
from xfuser_cocodiff.engine.kernels.rows import SHARES, ActiveTokens, Prediction
from xfuser_cocodiff.engine.settings.options import EXACT
from xfuser_cocodiff.engine.topology.plans import Plan
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.lab.reporting import host
from xfuser_cocodiff.lab.simulation.workloads import WORKLOADS, Workload

CASES = (("flux.1-dev", 1024), ("qwen-image", 2304))
"""Models and pixels."""
DEGREES = (2, 4, 6, 8, 12, 24)
"""That divide the heads of both, on two nodes."""
PLACES = 2
"""On slow axes: nodes."""
BITS, SHARE = 2, 0.6
"""As in the modes."""
CODED = ("balanced", "fast")
"""Modes whose codecs are timed."""
STEPS = 50
"""Of the run that layers are taken from."""
SEED = 0
HOST_TOKENS = 2
"""Of a rank: so few that exchanges take what the host takes to call for them."""


@dataclass(frozen=True)
class _Work:
    """A kernel at one size."""

    name: str
    call: Callable[[], object]
    nbytes: int
    """Read and written, each tensor once."""


def measure(device: torch.device, degree: int, repeats: int, cases: Sequence[tuple[str, int]] = CASES) -> dict:
    """Time each kernel, a copy of as many bytes, and the layer that it belongs to.

    Args:
        device: where.
        degree: ranks on PLACES nodes.
        repeats: measurements of each, taking turns.
        cases: workloads by name, and pixels.

    Returns:
        The record: for each row `seconds`, `bytes_per_second` and their ratio to the copy's, each a list of repeats;
        for each case and mode what encoding Q, K, V and O adds to attention and projections of the layer: all that the
        device does in exchanges by codecs, less the same in exact ones; and for each mode what the exchanges of a layer
        take of the host.
    """
    rows, layers = [], []
    for name, resolution in cases:
        workload = WORKLOADS[name]
        works = _works(workload, resolution, degree, device)
        copy = _copy(works[-1].nbytes, device)
        layer = [_Work("layer", _layer(workload, resolution, degree, device), 0)]
        layer += _by_modes(workload, _tokens(workload, resolution, degree), degree, device)
        seconds = _in_turns([copy, *works, *layer], repeats)
        for work in works:
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
    calls = _in_turns(_by_modes(WORKLOADS[first], HOST_TOKENS, degree, device), repeats)
    record = {**host.header(), "device": _name(device), "kernels": kernels.backend_for(device), "degree": degree}
    on_host = [{"model": first, "mode": mode, "seconds": taken} for mode, taken in calls.items()]
    return {**record, "rows": rows, "layers": layers, "host_calls": on_host}


def show(record: dict[str, Any]) -> None:
    """Print a record as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"kernels ({record['kernels']}) on {record['device']}, degree {record['degree']}")
    for column in ("model", "pixels", "kernel", "MB", "us", "GB/s", "of a copy"):
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
            f"{layer['model']} at {layer['resolution']}: coding as in {layer['mode']} adds "
            f"{median(layer['share']):.1%} ({min(layer['share']):.1%} to {max(layer['share']):.1%}) to a layer's "
            f"projections and attention ({1e3 * median(layer['layer_seconds']):.2f} ms)"
        )
    for calls in record["host_calls"]:
        low, middle, high = (1e3 * pick(calls["seconds"]) for pick in (min, median, max))
        console.print(
            f"{calls['model']}: the exchanges of a layer take the host {middle:.2f} ms ({low:.2f} to {high:.2f}) in "
            f"mode {calls['mode']}, with {HOST_TOKENS} tokens a rank and nobody to wait for"
        )


def _works(workload: Workload, resolution: int, degree: int, device: torch.device) -> list[_Work]:
    """The kernels on what a rank puts on slow axes of one of Q, K, V and O."""
    torch.manual_seed(SEED)
    groups, heads = degree // PLACES, workload.heads // degree
    tokens, dim = _tokens(workload, resolution, degree), workload.head_dim
    # Tokens outside of heads, as exchanges along fast axes leave them.
    values = torch.randn(PLACES, groups, tokens, heads, dim, device=device).bfloat16().transpose(2, 3)
    held = torch.randn(PLACES - 1, groups, heads, tokens, dim, device=device).bfloat16()
    shares = torch.full((len(held),), SHARES // 2, dtype=torch.uint8, device=device)
    known = Prediction(held, held + 0.1 * torch.randn_like(held), shares)
    target, here = torch.empty_like(values), range(1)
    count = int(SHARE * tokens)
    mask = torch.zeros(*held.shape[:2], tokens, dtype=torch.uint8, device=device)
    active = ActiveTokens(
        mask.scatter_(-1, kernels.scores(values, known, here).topk(count, -1).indices, 1), tokens, count
    )
    sizes = [Codec(BITS).payload_bytes((*held.shape[:3], sent, dim), held.dtype) for sent in (tokens, count)]
    payload, some = (torch.zeros(PLACES, size, dtype=torch.uint8, device=device) for size in sizes)
    full, encoded = held.nbytes, (PLACES - 1) * sizes[0]
    return [
        _Work("scores", lambda: kernels.scores(values, known, here), 3 * full),
        _Work("encode", lambda: kernels.encode(values, known, BITS, None, payload, here), 4 * full + encoded),
        _Work(
            "encode, chosen tokens",
            lambda: kernels.encode(values, known, BITS, active, some, here),
            4 * full + (PLACES - 1) * sizes[1],
        ),
        _Work("decode", lambda: kernels.decode(payload, known, BITS, None, target, here), 4 * full + encoded),
    ]


def _tokens(workload: Workload, resolution: int, degree: int) -> int:
    """Of a rank."""
    return -(-workload.tokens(resolution) // degree)


def _copy(nbytes: int, device: torch.device) -> _Work:
    source = torch.empty(nbytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _Work("copy", lambda: target.copy_(source), nbytes)


def _layer(workload: Workload, resolution: int, degree: int, device: torch.device) -> Callable[[], object]:
    """Attention over all tokens of a rank's heads, and the projections of a rank's tokens."""
    tokens = workload.tokens(resolution)
    own, heads = _tokens(workload, resolution, degree), workload.heads // degree
    q = torch.randn(1, heads, tokens, workload.head_dim, device=device).bfloat16()
    hidden = torch.randn(own, workload.width, device=device).bfloat16()
    square = torch.randn(workload.width, workload.width, device=device).bfloat16()
    projections = 4 + int(workload.mlp_projections)

    def layer() -> None:
        for _ in range(projections):
            torch.mm(hidden, square)
        torch.nn.functional.scaled_dot_product_attention(q, q, q)

    return layer


class _Still(Stages):
    """Messages arrive at once, as they were sent: what is left of an exchange is what the device does."""

    def start(self, buffer: torch.Tensor, plan: Plan, number: int) -> PendingStage:
        dim = plan.dims[number]
        sent = (buffer.movedim(dim, 0) if dim else buffer).contiguous()
        return lambda: sent.movedim(0, dim)


def _still(comm_stream: CommStream, **axes: int) -> Mesh:
    """A mesh over some axes."""
    topology = Topology.named(**axes)
    plan = Plan.hierarchical(topology)
    return Mesh(
        topology, _Still(dict.fromkeys(plan.stages), comm_stream.device), PlanPolicy(lambda nbytes: plan), comm_stream
    )


def _by_modes(workload: Workload, tokens: int, degree: int, device: torch.device) -> list[_Work]:
    """The exchanges of a layer, in each mode."""
    return [_Work(mode, _exchanges(workload, tokens, degree, device, mode), 0) for mode in (EXACT, *CODED)]


def _exchanges(workload: Workload, tokens: int, degree: int, device: torch.device, mode: str) -> Callable[[], object]:
    """All exchanges of a layer of which a rank has so many tokens, as in the later steps of a long run in a mode."""
    torch.manual_seed(SEED)
    comm_stream, near = CommStream(device), {"gpu": degree // PLACES} if degree > PLACES else {}
    mesh, fast = _still(comm_stream, node=PLACES, **near), _still(comm_stream, **near) if near else None
    partition = AxisPartition((0,), mesh.topology.shape, 0, _still(comm_stream, node=PLACES), fast)
    query, key, value = (
        torch.randn(1, workload.heads, tokens, workload.head_dim, device=device).bfloat16() for _ in range(3)
    )
    link_states: dict = {}
    preset = modes.preset(mode, STEPS)
    codecs = preset.codecs(STEPS - 1, STEPS) if preset else None

    def call() -> None:
        layer_codecs = LayerCodecs(partition, codecs, link_states, CodecStats(), seed=0) if codecs else None
        ulysses_attention(query, key, value, lambda query, key, value, part: query, mesh, layer_codecs=layer_codecs)

    call()  # which finds no references, and sends all
    return call


def _in_turns(works: Sequence[_Work], repeats: int) -> dict[str, list[float]]:
    """Seconds of each, as PyTorch's timer has them: with the device in step, and as many calls as it takes."""
    timers = {work.name: benchmark.Timer("call()", globals={"call": work.call}) for work in works}
    seconds: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(repeats):
        for name, timer in timers.items():
            seconds[name].append(timer.blocked_autorange(min_run_time=0.1).median)
    return seconds


def _name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    return getattr(torch, device.type).get_device_name()
