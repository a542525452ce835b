"""`cocodiff bench model`: steps of a FLUX transformer, stock against the plugin's modes, on links of every speed.

The links of an emulated cluster are slowed down and sped up until stock's all-to-alls take the asked share of a step,
so that the result is about the ratio of computation to communication, and not about one machine.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from xfuser_cocodiff import planner, probe
from xfuser_cocodiff.bench import host, links
from xfuser_cocodiff.bench.contest import contest, mean
from xfuser_cocodiff.choice import by_trial
from xfuser_cocodiff.collectives import Mesh
from xfuser_cocodiff.config import MODES
from xfuser_cocodiff.plan import Plan
from xfuser_cocodiff.topology import Topology
from xfuser_cocodiff.xdit import world
from xfuser_cocodiff.xdit.sites import TRAFFIC

SHAPES = {"high-resolution": 1024, "low-resolution": 256}
"""Image tokens by name."""
_TEXT_TOKENS, _TEXT_WIDTH = 64, 64
_CLOSE, _ATTEMPTS, _TRIALS = 0.02, 6, 3


@dataclass(frozen=True)
class Shape:
    """Sizes of the transformer."""

    width: int
    depth: int
    tokens: int
    heads: int

    @classmethod
    def named(cls, name: str, ranks: int, **sizes: int | None) -> "Shape":
        """A shape by name, with some sizes given; the others suit the number of ranks.

        Raises:
            ValueError: an unknown name, or sizes that do not divide.
        """
        if name not in SHAPES:
            raise ValueError(f"--shape {name!r} is not known; valid are {', '.join(SHAPES)}")
        heads = sizes["heads"] or math.ceil(8 / ranks) * ranks
        width = sizes["width"] or heads * max(16, 512 // heads // 8 * 8)
        tokens = sizes["tokens"] or math.ceil(SHAPES[name] / ranks) * ranks
        shape = cls(width, sizes["depth"] or 6, tokens, heads)
        if min(shape.width, shape.depth, tokens, heads) < 1 or heads % ranks or tokens % ranks or width % (8 * heads):
            raise ValueError(
                f"--heads {heads} and --tokens {tokens} must be multiples of the {ranks} ranks, --width {width} one of "
                f"8 times the heads, and --depth {shape.depth} at least 1"
            )
        return shape


@dataclass
class Contender:
    """One side: stock, or a mode of the plugin."""

    mesh: Mesh | None
    plan: Callable[[int], Plan] | None
    """The plan for a message of so many bytes."""
    messages: Counter[int]
    """Exchanges of a step by their bytes, once it has run."""
    waited: list[float]
    """Seconds of all-to-alls in each step so far."""


def shares(text: str) -> list[float]:
    """Read '0.5,0.9'.

    Raises:
        ValueError: not shares between 0 and 1.
    """
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [0.0]
    if not all(0 < share < 1 for share in found):
        raise ValueError(f"--share {text!r} is not valid; valid are numbers between 0 and 1, separated by commas")
    return found


def measure(
    group: dist.ProcessGroup,
    topology: Topology,
    shape: Shape,
    asked_shares: Sequence[float],
    modes: Sequence[str],
    repeats: int,
) -> dict[str, Any]:
    """Time steps of stock and of each mode at each share.

    Args:
        group: all ranks, on an emulated cluster.
        topology: how they nest.
        shape: of the transformer.
        asked_shares: of stock's step that its all-to-alls are to take.
        modes: of MODES, each as it is or with a plan behind a slash, such as 'exact/hierarchical'.
        repeats: steps of each, in turns.

    Raises:
        ValueError: unknown modes, or no emulated cluster.
    """
    plans = {mode: _plan(mode, topology) for mode in modes}
    if links.from_environment() is None:
        raise ValueError("`bench model` changes the speed of its links: run it on scripts/emulated_cluster.sh")
    step = _step(shape)
    rows = []
    for asked in asked_shares:
        stock = Contender(None, None, Counter(), [])
        cluster = _find_scale(asked, step, stock)
        contenders = {"stock": stock}
        profile = probe.measure(Mesh.over(group, topology), group, torch.device("cpu"))
        for mode, plan in plans.items():
            contenders[mode] = _contender(group, topology, plan, profile)
        rows += _compare(contenders, profile, step, repeats, {"share_asked": asked, "scale": cluster.scale})
    sizes = {"width": shape.width, "depth": shape.depth, "tokens": shape.tokens, "heads": shape.heads}
    return {**host.header(), "topology": str(topology), "shape": sizes, "rates": dict(cluster.rates), "rows": rows}


def _plan(mode: str, topology: Topology) -> Plan | None:
    name, _, plan = mode.partition("/")
    if name not in MODES:
        raise ValueError(f"--mode {mode!r} is not known; valid are {', '.join(MODES)}, alone or as {MODES[0]}/PLAN")
    try:
        return Plan.parse(plan, topology) if plan else None
    except ValueError as error:
        raise ValueError(f"--mode {mode!r}: {error}") from None


def _contender(group: dist.ProcessGroup, topology: Topology, plan: Plan | None, profile: Any) -> Contender:
    """A side that runs over a mesh and counts its messages."""
    mesh = Mesh.over(group, topology, plan and [plan], TRAFFIC)
    mesh = mesh if plan else replace(mesh, choose=by_trial(mesh, profile, group, torch.device("cpu")))
    messages: Counter[int] = Counter()

    def choose(message_bytes: int) -> Plan:
        messages[message_bytes] += 1
        return mesh.choose(message_bytes)

    return Contender(replace(mesh, choose=choose), mesh.choose, messages, [])


def _step(shape: Shape) -> Callable[[], torch.Tensor]:
    """One denoising step: what a call of the transformer does, on inputs that are the same on every rank."""
    text = math.ceil(_TEXT_TOKENS / dist.get_world_size()) * dist.get_world_size()
    world.make_state(shape.heads, text)
    world.watch_stock()
    model = world.flux_transformer(shape.width, shape.heads, shape.depth, _TEXT_WIDTH)
    side = math.ceil(math.sqrt(shape.tokens))
    places = torch.stack([torch.zeros(side * side), *torch.cartesian_prod(*[torch.arange(side)] * 2).T], -1)
    generator = torch.Generator().manual_seed(1)
    inputs = {
        "hidden_states": torch.randn(1, shape.tokens, 64, generator=generator),
        "encoder_hidden_states": torch.randn(1, text, _TEXT_WIDTH, generator=generator),
        "pooled_projections": torch.randn(1, _TEXT_WIDTH, generator=generator),
        "timestep": torch.tensor([0.5]),
        "img_ids": places[: shape.tokens].float(),
        "txt_ids": torch.zeros(text, 3),
    }

    @torch.inference_mode()
    def step() -> torch.Tensor:
        return model(**inputs, return_dict=False)[0]

    return step


def _run(step: Callable[[], torch.Tensor], side: Contender) -> torch.Tensor:
    world.use(side.mesh)
    side.messages.clear()
    TRAFFIC.reset()
    result = step()
    side.waited.append(sum(TRAFFIC.seconds.values()))
    return result


def _find_scale(share: float, step: Callable[[], torch.Tensor], stock: Contender) -> links.Cluster:
    """Shape the links so that stock's all-to-alls take a share of its step, as near as the machine allows."""
    cluster = links.from_environment()
    for _ in range(_ATTEMPTS):
        stock.waited.clear()
        times = contest({"stock": lambda: _run(step, stock)}, _TRIALS, torch.device("cpu"))["stock"]
        whole, waited = median(times), mean(median(stock.waited[-_TRIALS:]), torch.device("cpu"))
        if abs(waited / whole - share) < _CLOSE:
            break
        wanted = (whole - waited) * share / (1 - share)  # computation stays, waiting goes with the links' speed
        slowest, fastest = min(cluster.rates.values()), max(cluster.rates.values())
        scale = min(max(cluster.scale * waited / wanted, links.MIN_RATE / slowest), links.MAX_RATE / fastest)
        if math.isclose(scale, cluster.scale, rel_tol=0.01):
            break
        cluster = links.shape(scale)
        dist.barrier()
    return cluster


def _compare(
    contenders: dict[str, Contender],
    profile: Any,
    step: Callable[[], torch.Tensor],
    repeats: int,
    known: dict[str, float],
) -> list[dict[str, Any]]:
    device = torch.device("cpu")
    expected = _run(step, contenders["stock"])
    equal = {mode: torch.equal(_run(step, side), expected) for mode, side in contenders.items()}
    for side in contenders.values():
        side.waited.clear()
    times = contest({mode: lambda side=side: _run(step, side) for mode, side in contenders.items()}, repeats, device)
    waited = {mode: mean(median(side.waited[-repeats:]), device) for mode, side in contenders.items()}
    compute = median(times["stock"]) - waited["stock"]
    rows = []
    for mode, seconds in times.items():
        messages = contenders[mode].messages
        plans = {size: contenders[mode].plan(size) for size in messages}
        predicted = sum(planner.seconds(profile, plans[size], size) * count for size, count in messages.items())
        rows.append(
            {
                **known,
                "share": waited["stock"] / median(times["stock"]),
                "mode": mode,
                "step_seconds": seconds,
                "speedup": median(a / b for a, b in zip(times["stock"], seconds, strict=True)),
                "a2a_seconds": waited[mode],
                "bit_equal": equal[mode],
                "hidden_share": 0.0,
                "bytes_slow_fraction": 1.0,
                "plans": {str(size): str(plan) for size, plan in plans.items()},
                "predicted_step_seconds": compute + predicted if plans else None,
            }
        )
    return rows


def show(record: dict[str, Any]) -> None:
    """Print a table: one row per share and mode."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    for column in ("share", "mode", "step ms", "least", "most", "speedup", "a2a ms", "predicted ms", "bits", "plans"):
        table.add_column(column, justify="left" if column in ("mode", "bits", "plans") else "right")
    for row in record["rows"]:
        seconds, predicted = row["step_seconds"], row["predicted_step_seconds"]
        figures = [median(seconds), min(seconds), max(seconds)]
        table.add_row(
            f"{row['share']:.2f}",
            row["mode"],
            *(f"{1000 * figure:.0f}" for figure in figures),
            f"{row['speedup']:.2f}",
            f"{1000 * row['a2a_seconds']:.0f}",
            "-" if predicted is None else f"{1000 * predicted:.0f}",
            "equal" if row["bit_equal"] else "differ",
            ", ".join(dict.fromkeys(row["plans"].values())),
        )
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)
    console.print(f"{record['topology']}, {record['shape']}", table)


def draw(record: dict[str, Any], file: Path) -> None:
    """Plot each mode's speedup over stock by stock's all-to-all share."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for mode in dict.fromkeys(row["mode"] for row in record["rows"]):
        rows = sorted((row for row in record["rows"] if row["mode"] == mode), key=lambda row: row["share"])
        axes.plot([row["share"] for row in rows], [row["speedup"] for row in rows], marker="o", label=mode)
    axes.set(xlabel="stock's all-to-all share of a step", ylabel="speedup over stock", title=record["topology"])
    axes.legend()
    figure.savefig(file)
