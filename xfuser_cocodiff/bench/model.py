"""`cocodiff bench model`: steps of a FLUX transformer, stock against the plugin's modes, on links of every speed.

The links of an emulated cluster are slowed down and sped up until stock's all-to-alls take the asked share of a step,
so that the result is about the ratio of computation to communication, and not about one machine. That share is what
they add to a step that does not communicate: how long a rank is in them says less, since ranks that share a processor
wait in them for each other's computation.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from xfuser_cocodiff.codec.runtime import Runtime, StepReport
from xfuser_cocodiff.emulation import links
from xfuser_cocodiff.exchange.mesh import Mesh
from xfuser_cocodiff.machine import planner
from xfuser_cocodiff.machine.plan import Plan
from xfuser_cocodiff.machine.profile import Profile
from xfuser_cocodiff.machine.topology import Topology
from xfuser_cocodiff.measuring import probe
from xfuser_cocodiff.measuring.contest import contest, mean, target_seconds, turns
from xfuser_cocodiff.measuring.findings import Findings
from xfuser_cocodiff.reporting import host
from xfuser_cocodiff.reporting.progress import Teller
from xfuser_cocodiff.settings.config import CocoDiffConfig, resolve
from xfuser_cocodiff.settings.options import OFF
from xfuser_cocodiff.settings.placement import Ranks, Split
from xfuser_cocodiff.xdit.engine import start
from xfuser_cocodiff.xdit.engine.engine import Engine
from xfuser_cocodiff.xdit.launching import world

Step = Callable[..., torch.Tensor]
"""Given its place in a run, from 0 to 1, what the transformer makes of the latents there."""
SHAPES = {
    "high-resolution": {"tokens": 4096, "heads": 32, "head": 16, "depth": 3},
    "low-resolution": {"tokens": 1024, "heads": 16, "head": 32, "depth": 6},
}
"""At the first, attention is more than half of the computation, as at the paper's 2304 pixels; at the second, 15 %."""
_TEXT_TOKENS, _TEXT_WIDTH = 64, 64
_CLOSE, _ATTEMPTS, _TRIALS = 0.02, 6, 3
_MOST_STEPS = 80
_USUAL_ATTEMPTS, _USUAL_STEPS = 3, 10
"""What is foreseen of them."""
_RUN_STEPS = 50
"""Of the runs that modes with a schedule are judged by."""
_OPTIONS = {"v_first", "head_groups", "schedule", "slow_axes"}
_GOLDEN = 0.618
"""Steps this share of a run apart cover it evenly, however many there are."""
_PACKET_SECONDS = 2e-3
"""Messages are long, and packets of a quarter of a millisecond would take a fifth of the processor from the ranks."""


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
        usual = SHAPES[name]
        heads = sizes["heads"] or math.ceil(usual["heads"] / ranks) * ranks
        width = sizes["width"] or heads * usual["head"]
        tokens = sizes["tokens"] or math.ceil(usual["tokens"] / ranks) * ranks
        shape = cls(width, sizes["depth"] or usual["depth"], tokens, heads)
        if min(shape.width, shape.depth, tokens, heads) < 1 or heads % ranks or tokens % ranks or width % (8 * heads):
            raise ValueError(
                f"--heads {heads} and --tokens {tokens} must be multiples of the {ranks} ranks, --width {width} one of "
                f"8 times the heads, and --depth {shape.depth} at least 1"
            )
        return shape

    def message_bytes(self, ranks: int) -> list[int]:
        """Of each exchange of a step, what a rank holds before it: Q, K and V of a layer in one, and O."""
        tokens = (self.tokens + _text_tokens(ranks)) // ranks
        return [tensors * tokens * self.width * torch.float32.itemsize for tensors in (3, 1)] * self.depth


def _text_tokens(ranks: int) -> int:
    return math.ceil(_TEXT_TOKENS / ranks) * ranks


@dataclass
class Contender:
    """One side: stock, or a mode of the plugin."""

    engine: Engine = field(default_factory=Engine)
    """Stock's when not given."""
    plan: Callable[[int], Plan] | None = None
    """The plan for a message of so many bytes."""
    messages: Counter[int] = field(default_factory=Counter)
    """Exchanges of a step by their bytes, once it has run."""
    a2a_seconds: list[float] = field(default_factory=list)
    """Of each step so far."""
    hidden_seconds: list[float] = field(default_factory=list)
    """Of these, those behind which the rank computed."""
    done: int = 0
    """Steps so far."""

    @property
    def runtime(self) -> Runtime | None:
        """What codecs know of the run that its steps make."""
        return self.engine.runtime

    def begin(self) -> None:
        """Stand at the first step of a new run."""
        self.engine.runs.begin(_RUN_STEPS)
        self.runtime.step, self.done = 0, 1

    def go_on(self) -> None:
        """Stand at another step of a run: first at those that refresh, then all over the others."""
        if self.done == 0:
            self.begin()
            return
        encoded = [step for step in range(_RUN_STEPS - 1) if not self.runtime.schedule.is_refresh(step)] or [0]
        past = self.done - encoded[0]
        self.runtime.step = self.done if past < 0 else encoded[round(past * _GOLDEN * len(encoded)) % len(encoded)]
        self.done += 1

    @property
    def position(self) -> float:
        """Where in a run it stands, from 0 to 1; somewhere in the middle where nothing depends on it."""
        return self.runtime.step / _RUN_STEPS if self.runtime else 0.5

    @property
    def refresh_share(self) -> float:
        """Of the steps of a run."""
        if self.runtime is None:
            return 0.0
        return sum(map(self.runtime.schedule.is_refresh, range(_RUN_STEPS))) / _RUN_STEPS

    @property
    def bytes_slow_fraction(self) -> float:
        """Of what a run would send on slow axes without codecs."""
        refreshed, encoded = (
            _sent_share([one for one in self.runtime.reports if one.was_refresh == refreshed] if self.runtime else [])
            for refreshed in (True, False)
        )
        return self.refresh_share * refreshed + (1 - self.refresh_share) * encoded


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
    settings = {mode: _settings(mode, topology, split) for mode in modes}
    if links.from_environment() is None:
        raise ValueError("`bench model` changes the speed of its links: run it on scripts/emulated_cluster.sh")
    step = _step(shape, compiled)
    told = Teller(sys.stderr if dist.get_rank() == 0 else None)
    told.say("timing steps that do not communicate")
    alone = _seconds({"alone": _alone(step, Contender())})["alone"]
    told.foresee(_foreseen(asked_shares, len(modes), repeats, alone))
    rows = []
    for number, asked in enumerate(asked_shares):
        stock = Contender()
        told.begin(str(number), f"share {asked:g}: finding the speed of the links")
        cluster = _find_scale(asked, step, stock, told)
        contenders = {"stock": stock}
        profile = probe.measure(Mesh.over(group, topology), group, torch.device("cpu"))
        for mode, config in settings.items():
            contenders[mode] = _contender(config, profile)
        known = {"share_asked": asked, "scale": cluster.scale, "compiled": compiled, "ring": split.ring}
        along = _along(profile, split) if split.ring == 1 else None
        rows += _compare(contenders, along, step, repeats, known, shape.message_bytes(topology.size), told)
    told.end()
    sizes = {"width": shape.width, "depth": shape.depth, "tokens": shape.tokens, "heads": shape.heads}
    ranks = {"topology": str(topology), "ranks": topology.size}
    return {**host.header(), **ranks, "shape": sizes, "rates": dict(cluster.rates), "rows": rows}


def _sent_share(reports: Sequence[StepReport]) -> float:
    """Of what would be sent without codecs; all of it where nothing is known."""
    exact = sum(report.exact_bytes for report in reports)
    return sum(report.sent_bytes for report in reports) / exact if exact else 1.0


def _foreseen(asked_shares: Sequence[float], modes: int, repeats: int, alone: float) -> dict[str, tuple[float, float]]:
    """For each share its turns, and the seconds of one."""
    pieces = _USUAL_ATTEMPTS * turns(2, _TRIALS) + _turns_of_sides(modes, repeats)
    seconds = [max(alone / (1 - asked), target_seconds()) for asked in asked_shares]
    return {str(number): (pieces, expected) for number, expected in enumerate(seconds)}


def _turns_of_sides(modes: int, repeats: int) -> int:
    """Turns at one share that are foreseen once its links are found."""
    return modes * _USUAL_STEPS + turns(modes + 2, repeats) + turns(modes + 1, _TRIALS)


def _settings(mode: str, topology: Topology, split: Split) -> CocoDiffConfig:
    """Settings of a mode in the notation of the command line, where a semicolon stands for a comma inside a value."""
    main, *fixed = mode.split("@")
    name, _, plan = main.partition("/")
    options = dict(option.partition("=")[::2] for option in fixed)
    try:
        if unknown := options.keys() - _OPTIONS:
            raise ValueError(f"{min(unknown)!r} is not valid after @; valid are {'=, '.join(sorted(_OPTIONS))}=")
        values = {"use_cocodiff": True, "cocodiff_mode": name, "cocodiff_a2a": plan or None, "cocodiff_cache": OFF}
        values |= {f"cocodiff_{key}": value.replace(";", ",") for key, value in options.items()}
        return resolve(values, {}, Ranks(split.ulysses, split.ulysses_topology(topology), split.ring, topology))
    except ValueError as error:
        raise ValueError(f"--mode {mode!r}: {error}") from None


def _contender(config: CocoDiffConfig, profile: Profile) -> Contender:
    """A side that runs over a mesh and counts its messages."""
    group, around = world.groups()
    if around.size() > 1:
        config = replace(config, ring_profile=profile.along(config.ring_topology))
    known = Findings({}, _along(profile, Split(group.size(), around.size())))
    engine = start.engine_over(group, config, known, around=around if around.size() > 1 else None)
    engine.trials.allowance.share = math.inf
    plan, messages = engine.mesh.policy.choose, Counter[int]()

    def choose(message_bytes: int) -> Plan:
        messages[message_bytes] += 1
        return plan(message_bytes)

    engine.mesh = replace(engine.mesh, policy=replace(engine.mesh.policy, choose=choose))
    return Contender(engine, plan, messages)


def _along(profile: Profile, split: Split) -> Profile | None:
    """What is known of the links of a Ulysses group, which a rank alone has none of."""
    return profile.along(split.ulysses_topology(profile.topology)) if split.ulysses > 1 else None


def _step(shape: Shape, compiled: bool = False) -> Step:
    """One denoising step: what a call of the transformer does, on inputs that are the same on every rank. From step to
    step they change as a run's latents and times do: from noise to something else on a straight line."""
    text = _text_tokens(dist.get_world_size())
    world.make_state(shape.heads, text)
    world.watch_stock()
    model = world.flux_transformer(shape.width, shape.heads, shape.depth, _TEXT_WIDTH)
    if compiled:
        model = world.compiled(model)
    side = math.ceil(math.sqrt(shape.tokens))
    places = torch.stack([torch.zeros(side * side), *torch.cartesian_prod(*[torch.arange(side)] * 2).T], -1)
    generator = torch.Generator().manual_seed(1)
    noise, picture = (torch.randn(1, shape.tokens, 64, generator=generator) for _ in range(2))
    inputs = {
        "encoder_hidden_states": torch.randn(1, text, _TEXT_WIDTH, generator=generator),
        "pooled_projections": torch.randn(1, _TEXT_WIDTH, generator=generator),
        "img_ids": places[: shape.tokens].float(),
        "txt_ids": torch.zeros(text, 3),
    }

    @torch.inference_mode()
    def step(position: float = 0.5) -> torch.Tensor:
        latents = torch.lerp(noise, picture, position)
        return model(hidden_states=latents, timestep=torch.tensor([1 - position]), **inputs, return_dict=False)[0]

    return step


def _run(step: Step, side: Contender, anew: bool = False) -> torch.Tensor:
    """A step of a side; if `anew`, the first one of a run."""
    world.use(side.engine)
    side.messages.clear()
    side.engine.traffic.reset()
    if side.runtime:
        side.begin() if anew else side.go_on()
    result = step(side.position)
    side.engine.runs.end_step()
    side.a2a_seconds.append(sum(side.engine.traffic.seconds.values()))
    side.hidden_seconds.append(side.engine.traffic.hidden_seconds)
    return result


def _alone(step: Step, stock: Contender) -> Callable[[], object]:
    """A step without communication, on all ranks at once."""

    def run() -> None:
        with world.nothing_sent():
            _run(step, stock)

    return run


def _seconds(works: Mapping[str, Callable[[], object]], after: Callable[[], object] = lambda: None) -> dict[str, float]:
    """Of each piece of work."""
    return {name: median(times) for name, times in contest(works, _TRIALS, torch.device("cpu"), after).items()}


def _find_scale(share: float, step: Step, stock: Contender, told: Teller) -> links.Cluster:
    """Shape the links so that stock's all-to-alls take a share of its step, as near as the machine allows."""
    cluster, seen = links.shape(links.from_environment().scale, _PACKET_SECONDS), []
    dist.barrier()
    for _ in range(_ATTEMPTS):
        works = {"alone": _alone(step, Contender()), "stock": lambda: _run(step, stock)}
        alone, whole = _seconds(works, told.advance).values()
        told.say(f"scale {cluster.scale:.3g}: stock's step takes {whole:.2f} s, {alone:.2f} s of it not in all-to-alls")
        seen.append((cluster.scale, whole, alone))
        share, scale = _towards(share, seen)
        slowest, fastest = min(cluster.rates.values()), max(cluster.rates.values())
        scale = min(max(scale, links.MIN_RATE / slowest), links.MAX_RATE / fastest)
        if abs(1 - alone / whole - share) < _CLOSE or math.isclose(scale, cluster.scale, rel_tol=0.01):
            break
        cluster = links.shape(scale, _PACKET_SECONDS)
        dist.barrier()
    return cluster


def _towards(share: float, seen: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """The share of stock's step that its all-to-alls can take, as near as possible to a wanted one, and the scale of
    links that makes it so.

    Computation stays as it is, and what is sent goes with the speed of links: all-to-alls, and what comes together at
    the end of a step, so that they never take all of it.

    Args:
        share: the wanted one.
        seen: scales of links so far, and at each the seconds of a step, and of one without all-to-alls.
    """
    scale, whole, alone = seen[-1]
    # Where links hardly count at all, they become slower by no more than ten times at once.
    moving = scale * max(whole - alone, 0.1 * alone * share / (1 - share))
    gathering = 0.0
    if len(seen) > 1:
        other_scale, _, other_alone = seen[-2]
        gathering = (alone - other_alone) / (1 / scale - 1 / other_scale)
        gathering = min(max(gathering, 0.0), 0.9 * alone * scale)
    share = min(share, moving / (moving + gathering) - _CLOSE)
    return share, (moving / share - moving - gathering) / (alone - gathering / scale)


def _settled(step: Step, side: Contender, expected: torch.Tensor, told: Teller) -> bool:
    """Run steps until nothing is tried any more; whether all of them had the bits that are expected."""
    equal = True
    for _ in range(_MOST_STEPS):
        equal &= torch.equal(_run(step, side), expected)
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
            contest(runs, _TRIALS, device, told.advance)
    a2a = {mode: mean(median(side.a2a_seconds[-_TRIALS:]), device) for mode, side in contenders.items()}
    return a2a, {mode: mean(median(side.hidden_seconds[-_TRIALS:]), device) for mode, side in contenders.items()}


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
    expected = _run(step, contenders["stock"])
    equal = {mode: _settled(step, side, expected, told) for mode, side in contenders.items()}
    told.expect(_turns_of_sides(0, repeats) * len(contenders) + turns(len(contenders), repeats))
    told.say(f"share {known['share_asked']:g}: measuring {', '.join(contenders)}")
    runs = {mode: lambda side=side: _run(step, side) for mode, side in contenders.items()}
    # Steps that owe nothing to others are timed as the first one of a run, which drops all references.
    coded = {mode: side for mode, side in contenders.items() if side.runtime}
    first = {mode: lambda side=side: _run(step, side, anew=True) for mode, side in coded.items()}
    # A machine changes its pace: what computation takes is of the same minutes.
    times = contest({**runs, "alone": _alone(step, Contender())}, repeats, device, told.advance)
    alone = median(times.pop("alone"))
    times_of_first = {**times, **(contest(first, repeats, device, told.advance) if first else {})}
    a2a, hidden = _seconds_of_exchanges(contenders, runs, device, told)
    told.expect(0)
    rows = []
    for mode, encoded in times.items():
        share = contenders[mode].refresh_share
        seconds = [share * anew + (1 - share) * own for anew, own in zip(times_of_first[mode], encoded, strict=True)]
        messages = contenders[mode].messages
        plans = {size: contenders[mode].plan(size) for size in messages}
        rows.append(
            {
                **known,
                "alone_seconds": alone,
                "share": 1 - alone / median(times["stock"]),
                "mode": mode,
                "step_seconds": seconds,
                "speedup": median(a / b for a, b in zip(times["stock"], seconds, strict=True)),
                "a2a_seconds": a2a[mode] or None,  # stock's in a graph are not seen
                "bit_equal": equal[mode],
                "hidden_share": min(1.0, hidden[mode] / a2a[mode]) if a2a[mode] else None,
                "bytes_slow_fraction": contenders[mode].bytes_slow_fraction,
                "plans": {str(size): str(plan) for size, plan in plans.items()},
                "schedules": {
                    kind.name: str(kind.trial.schedule) for kind in contenders[mode].engine.layers.kinds if kind.trial
                },
                "predicted_step_seconds": _predicted(profile, plans, messages, alone),
                "bound_seconds": _bound(exact_bytes, profile, contenders[mode], alone),
            }
        )
    return rows


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
