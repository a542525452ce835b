"""`cocodiff bench model`: steps of a FLUX transformer, stock against the plugin's modes, on links of every speed.

The links of an emulated cluster are slowed down and sped up until stock's all-to-alls take the asked share of a step,
so that the result is about the ratio of computation to communication, and not about one machine. That share is what
they add to a step that does not communicate: how long a rank is in them says less, since ranks that share a processor
wait in them for each other's computation.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from xfuser_cocodiff.bench import contender, link_speed, transformer
from xfuser_cocodiff.bench.contender import Contender, without_sending
from xfuser_cocodiff.bench.transformer import Shape, Step
from xfuser_cocodiff.emulation import links
from xfuser_cocodiff.exchange.mesh import Mesh
from xfuser_cocodiff.machine import planner
from xfuser_cocodiff.machine.plan import Plan
from xfuser_cocodiff.machine.profile import Profile
from xfuser_cocodiff.machine.topology import Topology
from xfuser_cocodiff.measuring import probe
from xfuser_cocodiff.measuring.contest import contest, mean, target_seconds, turns
from xfuser_cocodiff.reporting import host
from xfuser_cocodiff.reporting.progress import Teller
from xfuser_cocodiff.settings.placement import Split
from xfuser_cocodiff.xdit.launching import world

_MOST_STEPS = 80
_USUAL_ATTEMPTS, _USUAL_STEPS = 3, 10
"""What is foreseen of them."""


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
    compiled: bool = False,
) -> dict[str, Any]:
    """Time steps of stock and of each mode at each share.

    Args:
        group: all ranks, on an emulated cluster.
        topology: how they nest.
        shape: of the transformer.
        asked_shares: of stock's step that its all-to-alls are to take.
        modes: each MODE[/PLAN] and options of the plugin, such as 'exact/flat@head_groups=2@v_first=on'.
        repeats: steps of each, in turns.
        compiled: whether the transformer is, on all sides.

    Raises:
        ValueError: unknown modes, or no emulated cluster.
    """
    split = Split(*(part.size() for part in world.groups()))
    settings = {mode: contender.settings_of(mode, topology, split) for mode in modes}
    if links.from_environment() is None:
        raise ValueError("`bench model` changes the speed of its links: run it on scripts/emulated_cluster.sh")
    step = transformer.step(shape, compiled)
    told = Teller(sys.stderr if dist.get_rank() == 0 else None)
    told.say("timing steps that do not communicate")
    alone = link_speed.seconds({"alone": without_sending(step)})["alone"]
    told.foresee(_foreseen(asked_shares, len(modes), repeats, alone))
    rows = []
    for number, asked in enumerate(asked_shares):
        stock = Contender()
        told.begin(str(number), f"share {asked:g}: finding the speed of the links")
        cluster = link_speed.find(asked, step, stock, told)
        contenders = {"stock": stock}
        profile = probe.measure(Mesh.over(group, topology), group, torch.device("cpu"))
        for mode, config in settings.items():
            contenders[mode] = contender.over(config, profile)
        known = {"share_asked": asked, "scale": cluster.scale, "compiled": compiled, "ring": split.ring}
        along = contender.along(profile, split) if split.ring == 1 else None
        rows += _compare(contenders, along, step, repeats, known, shape.message_bytes(topology.size), told)
    told.end()
    sizes = {"width": shape.width, "depth": shape.depth, "tokens": shape.tokens, "heads": shape.heads}
    ranks = {"topology": str(topology), "ranks": topology.size}
    return {**host.header(), **ranks, "shape": sizes, "rates": dict(cluster.rates), "rows": rows}


def _foreseen(asked_shares: Sequence[float], modes: int, repeats: int, alone: float) -> dict[str, tuple[float, float]]:
    """For each share its turns, and the seconds of one."""
    pieces = _USUAL_ATTEMPTS * turns(2, link_speed.TRIALS) + _turns_of_sides(modes, repeats)
    seconds = [max(alone / (1 - asked), target_seconds()) for asked in asked_shares]
    return {str(number): (pieces, expected) for number, expected in enumerate(seconds)}


def _turns_of_sides(modes: int, repeats: int) -> int:
    """Turns at one share that are foreseen once its links are found."""
    return modes * _USUAL_STEPS + turns(modes + 2, repeats) + turns(modes + 1, link_speed.TRIALS)


def _settled(step: Step, side: Contender, expected: torch.Tensor, told: Teller) -> bool:
    """Run steps until nothing is tried any more; whether all of them had the bits that are expected."""
    equal = True
    for _ in range(_MOST_STEPS):
        equal &= torch.equal(side.run(step), expected)
        told.advance()
        if side.engine.trials is None or side.engine.trials.settled:
            break
    return equal


def _seconds_of_exchanges(
    contenders: dict[str, Contender], runs: Mapping[str, Callable[[], object]], device: torch.device, told: Teller
) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each side's all-to-alls, and of those that were hidden, in steps that are not timed themselves."""
    for timed in (True, False):
        for side in contenders.values():
            side.engine.traffic.timed = timed
        if timed:
            contest(runs, link_speed.TRIALS, device, told.advance)

    def latest(seconds: Sequence[float]) -> float:
        return mean(median(seconds[-link_speed.TRIALS :]), device)

    a2a = {mode: latest(side.a2a_seconds) for mode, side in contenders.items()}
    return a2a, {mode: latest(side.hidden_seconds) for mode, side in contenders.items()}


def _compare(
    contenders: dict[str, Contender],
    profile: Profile | None,
    step: Step,
    repeats: int,
    known: dict[str, float],
    exact_bytes: Sequence[int],
    told: Teller,
) -> list[dict[str, Any]]:
    device = torch.device("cpu")
    told.expect(_turns_of_sides(len(contenders) - 1, repeats))
    told.say(f"share {known['share_asked']:g}: trials of {', '.join(contenders)}")
    expected = contenders["stock"].run(step)
    equal = {mode: _settled(step, side, expected, told) for mode, side in contenders.items()}
    told.expect(_turns_of_sides(0, repeats) * len(contenders) + turns(len(contenders), repeats))
    told.say(f"share {known['share_asked']:g}: measuring {', '.join(contenders)}")
    runs = {mode: lambda side=side: side.run(step) for mode, side in contenders.items()}
    # Steps that owe nothing to others are timed as the first one of a run, which drops all references.
    coded = {mode: side for mode, side in contenders.items() if side.runtime}
    first = {mode: lambda side=side: side.run(step, anew=True) for mode, side in coded.items()}
    # A machine changes its pace: what computation takes is of the same minutes.
    times = contest({**runs, "alone": without_sending(step)}, repeats, device, told.advance)
    alone = median(times.pop("alone"))
    times_of_first = {**times, **(contest(first, repeats, device, told.advance) if first else {})}
    a2a, hidden = _seconds_of_exchanges(contenders, runs, device, told)
    told.expect(0)
    rows = []
    for mode, side in contenders.items():
        share = side.refresh_share
        seconds = [
            share * anew + (1 - share) * own for anew, own in zip(times_of_first[mode], times[mode], strict=True)
        ]
        row = {
            "alone_seconds": alone,
            "share": 1 - alone / median(times["stock"]),
            "mode": mode,
            "step_seconds": seconds,
            "speedup": median(a / b for a, b in zip(times["stock"], seconds, strict=True)),
            "a2a_seconds": a2a[mode] or None,  # stock's in a graph are not seen
            "bit_equal": equal[mode],
            "hidden_share": min(1.0, hidden[mode] / a2a[mode]) if a2a[mode] else None,
        }
        rows.append({**known, **row, **_of_side(side, profile, exact_bytes, alone)})
    return rows


def _of_side(side: Contender, profile: Profile | None, exact_bytes: Sequence[int], alone: float) -> dict[str, Any]:
    """What is known of a side without a clock."""
    plans = {size: side.plan(size) for size in side.messages}
    return {
        "bytes_slow_fraction": side.bytes_slow_fraction,
        "plans": {str(size): str(plan) for size, plan in plans.items()},
        "schedules": {kind.name: str(kind.trial.schedule) for kind in side.engine.layers.kinds if kind.trial},
        "predicted_step_seconds": _predicted(profile, plans, side.messages, alone),
        "bound_seconds": _bound(exact_bytes, profile, side, alone),
    }


def _predicted(
    profile: Profile | None, plans: Mapping[int, Plan], messages: Mapping[int, int], alone: float
) -> float | None:
    """Seconds of a step, where the exchanges of a Ulysses group are all that is sent, and their plans are known."""
    if profile is None or not plans:
        return None
    return alone + sum(planner.seconds(profile, plans[size], size) * count for size, count in messages.items())


def _bound(exact_bytes: Sequence[int], profile: Profile | None, side: Contender, alone: float) -> float | None:
    """Seconds of a step of a side if calls and coding cost nothing: the longer of computation and the busiest link, or
    where something is coded, computation and then what is left of its bytes. None where a ring is sent along too."""
    if profile is None:
        return None
    moving = sum(planner.bound_seconds(profile, size) for size in exact_bytes)
    return alone + side.bytes_slow_fraction * moving if side.runtime else max(alone, moving)


def show(record: dict[str, Any]) -> None:
    """Print a table: one row per share and mode."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    for column in (
        "share",
        "mode",
        "step ms",
        "least",
        "most",
        "speedup",
        "bound",
        "a2a ms",
        "hidden",
        "bytes",
        "bits",
        "schedules",
        "plans",
    ):
        table.add_column(column, justify="left" if column in ("mode", "bits", "schedules", "plans") else "right")
    stock: list[float] = []
    for row in record["rows"]:
        seconds = row["step_seconds"]
        stock = seconds if row["mode"] == "stock" else stock
        figures = [median(seconds), min(seconds), max(seconds)]
        table.add_row(
            f"{row['share']:.2f}",
            row["mode"],
            *(f"{1000 * figure:.0f}" for figure in figures),
            f"{row['speedup']:.2f}",
            f"{median(stock) / row['bound_seconds']:.2f}" if row["bound_seconds"] else "-",
            "-" if row["a2a_seconds"] is None else f"{1000 * row['a2a_seconds']:.0f}",
            "-" if row["hidden_share"] is None else f"{row['hidden_share']:.2f}",
            f"{row['bytes_slow_fraction']:.3f}",
            "equal" if row["bit_equal"] else "differ",
            "; ".join(dict.fromkeys(row["schedules"].values())),
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
