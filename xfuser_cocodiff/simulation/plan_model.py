"""The record of `cocodiff plan --model`: how to split a degree for a model of real size, on a machine or a profile."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xfuser_cocodiff.codec.memory import GIB
from xfuser_cocodiff.machine.profile import Profile
from xfuser_cocodiff.machine.topology import FLAT, Topology
from xfuser_cocodiff.reporting import host
from xfuser_cocodiff.reporting.words import percent, size, time
from xfuser_cocodiff.settings.options import MODES
from xfuser_cocodiff.simulation.machines import MACHINES, Machine
from xfuser_cocodiff.simulation.prediction import STOCK, Case, Prediction, predict, predictions
from xfuser_cocodiff.simulation.sharding import ulysses_degrees
from xfuser_cocodiff.simulation.workloads import PIXELS_PER_TOKEN, WORKLOADS, Workload

ALIASES = {"flux1": "flux.1-dev", "flux2": "flux.2-dev", "sd35": "sd3.5-large"}
"""Short names of models."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be planned, as the command line has it."""

    model: str
    resolution: int
    degree: int
    topology: str | None = None
    """Of all ranks; without it that of the profile, or of the cluster's nodes."""
    profile: Path | None = None
    cluster: str | None = None
    """The machine: one of the two."""
    mode: str | None = None
    """None for that of a run without --cocodiff_mode."""
    steps: int = 50
    batch: int = 1
    text_tokens: int | None = None
    """Those of the pipeline if None."""
    teraflops: float | None = None
    """What a rank reaches; the cluster's if None."""

    def __post_init__(self) -> None:
        if (self.profile is None) == (self.cluster is None):
            raise ValueError(
                f"--model needs one machine: --cluster, one of {', '.join(MACHINES)}, or --profile, a file that "
                "`cocodiff probe --json` wrote"
            )
        check_count("--resolution", self.resolution, PIXELS_PER_TOKEN)
        for option in ("degree", "steps", "batch", "text_tokens"):
            if getattr(self, option) is not None:
                check_count("--" + option.replace("_", "-"), getattr(self, option))
        if self.degree < 2:
            raise ValueError("--degree 1 is not valid; there is nothing to split among fewer than 2 ranks")
        if self.mode is not None:
            check_name("--mode", self.mode, MODES)
        if self.teraflops is not None and not self.teraflops > 0:
            raise ValueError(f"--tflops {self.teraflops:g} is not valid; it is a number above 0")

    @property
    def workload(self) -> Workload:
        """The model.

        Raises:
            ValueError: there is no such model.
        """
        check_name("--model", self.model, [*ALIASES, *WORKLOADS])
        found = WORKLOADS[ALIASES.get(self.model, self.model)]
        return dataclasses.replace(found, text_tokens=self.text_tokens or found.text_tokens)

    def case(self) -> Case:
        """Return what is known of it.

        Raises:
            ValueError: an option is not valid, or they do not go together.
        """
        flops = self.teraflops and 1e12 * self.teraflops
        profile_of: Callable[[Topology, float], Profile]
        if self.profile:
            known = Profile.read(self.profile)
            topology, axes = self._given() or known.topology, [axis.name for axis in known.topology.axes]
            profile_of = functools.partial(_along, known)
        else:
            check_name("--cluster", str(self.cluster), MACHINES)
            machine = MACHINES[str(self.cluster)]
            topology, axes = self._given() or _nodes(machine, self.degree), [link.name for link in machine.links]
            profile_of, flops = machine.over, flops or machine.flops
        if topology.size != self.degree:
            raise ValueError(f"{topology} are {topology.size} ranks, but --degree is {self.degree}")
        if unknown := [axis.name for axis in topology.axes if axis.name not in axes]:
            raise ValueError(
                f"--topology {topology}: {self.profile or self.cluster} has no axis {', '.join(unknown)}, only "
                f"{', '.join(axes)}"
            )
        return Case(self.workload, self.resolution, self.batch, self.steps, topology, profile_of, flops)

    def _given(self) -> Topology | None:
        if self.topology is None:
            return None
        try:
            return Topology.parse(self.topology, self.degree if self.topology.strip() == FLAT else None)
        except ValueError as error:
            raise ValueError(f"--topology: {error}") from None


def _along(known: Profile, part: Topology, message_bytes: float) -> Profile:
    """Contention is as it was measured, whatever the message."""
    return known.along(part)


def check_count(option: str, value: int, multiple: int = 1) -> None:
    """Raise a ValueError unless an option is a positive multiple."""
    if value < 1 or value % multiple:
        what = "1 or more" if multiple == 1 else f"a positive multiple of {multiple}"
        raise ValueError(f"{option} {value} is not valid; it must be {what}")


def check_name(option: str, name: str, valid: Iterable[str]) -> None:
    """Raise a ValueError unless an option is one of the valid names."""
    if name not in (known := list(valid)):
        raise ValueError(f"{option} {name!r} is not valid; valid are {', '.join(known)}")


def _nodes(machine: Machine, degree: int) -> Topology:
    """Of whole nodes, or of a part of one."""
    nodes, rest = divmod(degree, machine.ranks_per_node)
    part = machine.topology(1).neighbouring(degree) if nodes == 0 else machine.topology(nodes)
    if (nodes and rest) or part.axes[0].name == FLAT:
        raise ValueError(
            f"--degree {degree} does not fit nodes of {machine.name}, which have {machine.ranks_per_node} ranks as "
            f"{machine.topology(1)}; --topology says how its ranks lie"
        )
    return part


def record(request: Request) -> dict[str, Any]:
    """Return the record: how heads and tokens divide, every split, and every mode on the best of them.

    Raises:
        ValueError: an option is not valid, or no split is possible.
    """
    case = request.case()
    found, heads = predictions(case, request.mode), case.workload.heads
    if not found:
        raise ValueError(
            f"no Ulysses degree among {request.degree} ranks, nor a ring beside it, lies on the axes of "
            f"{case.topology}; --topology or another --degree would help"
        )
    best, held = found[0], case.shard
    theirs = next(iter(predictions(case, STOCK)), None)
    known = theirs and theirs.step_seconds

    def row(each: Prediction) -> dict[str, Any]:
        speedup = known / each.step_seconds if known and each.step_seconds else None
        return {**dataclasses.asdict(each), "speedup": speedup}

    return {
        **host.header(),
        "model": case.workload.name,
        "resolution": request.resolution,
        "batch": request.batch,
        "steps": request.steps,
        "degree": request.degree,
        "topology": str(case.topology),
        "machine": str(request.profile or request.cluster),
        "heads": heads,
        "ulysses_degrees": ulysses_degrees(heads, request.degree),
        "tokens_per_rank": {"image": held.image, "text": held.text},
        "remarks": list(held.remarks),
        "problem": held.problem,
        "stock": theirs and {**row(theirs), "share": theirs.a2a_seconds / known if known else None},
        "splits": [row(each) for each in found],
        "modes": [row(predict(case, best.split, mode)) for mode in MODES],
        "flags": flags(best, case.topology),
    }


def flags(best: Prediction, whole: Topology) -> str:
    """Return what to add to a launch script."""
    ring = f" --cocodiff_ring {best.placement}" if best.ring > 1 else ""
    degrees = f"--ulysses_degree {best.ulysses} --ring_degree {best.ring}"
    return f"{degrees} --use_cocodiff --cocodiff_topology {whole}{ring} --cocodiff_mode {best.mode}"


def show(record: dict[str, Any]) -> None:
    """Print a record."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 200)
    batch = f", batch {record['batch']}" if record["batch"] > 1 else ""
    console.print(
        f"{record['model']}, {record['resolution']} px{batch}, {record['steps']} steps, {record['degree']} ranks as "
        f"{record['topology']} of {record['machine']}; predicted, not measured"
    )
    console.print(*_divisibility(record), sep="\n")
    if (stock := record["stock"]) and stock["step_seconds"]:
        console.print(
            f"stock's fastest split is {stock['ulysses']} x {stock['ring']}: {time(stock['step_seconds'])} a step, of "
            f"which all-to-alls {time(stock['a2a_seconds'])} ({percent(stock['share'])}) and ring "
            f"{time(stock['ring_seconds'])}"
        )
    sent = ("all-to-all sends", "ring sends")
    print("\nsplits, the fastest first; bytes and times of one step on one rank:")
    console.print(_table(record["splits"], ("Ulysses x Ring", "ring lies", "Ulysses group", "mode", *sent)))
    print("\nmodes on the first of them:")
    console.print(_table(record["modes"], ("mode", *sent, "references", "in 8 bits")))
    if not record["modes"][-1]["reference_bytes"]:
        console.print("No axis of its Ulysses groups is slow: every mode is lossless.")
    console.print(f"\nflags{' for when that is mended' * bool(record['problem'])}: {record['flags']}")


def _divisibility(record: dict[str, Any]) -> list[str]:
    possible, held = record["ulysses_degrees"], record["tokens_per_rank"]
    allowed = f"{record['heads']} heads: stock's Ulysses degree must divide them, as {', '.join(map(str, possible))} do"
    if possible[-1] < record["degree"]:
        allowed += "; for others the plugin adds heads of zeros"
    lines = [allowed, f"a rank has {held['image']} image tokens and {held['text']} text tokens", *record["remarks"]]
    return lines + ([f"but {record['problem']}"] if record["problem"] else [])


def _table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> Any:
    from rich.table import Table

    found, times = Table(box=None), ("all-to-all", "ring", "step", "speedup")
    for column in (*columns, *times):
        found.add_column(column, justify="right" if column in times else "left", no_wrap=True)
    for row in rows:
        known = {
            "Ulysses x Ring": f"{row['ulysses']} x {row['ring']}",
            "ring lies": row["placement"] if row["ring"] > 1 and row["ulysses"] > 1 else "",
            "Ulysses group": row["topology"],
            "mode": row["mode"],
            "all-to-all sends": _bytes(row["sent_bytes"]),
            "ring sends": _bytes(row["ring_bytes"]),
            "references": f"{row['reference_bytes'] / GIB:.2f} GiB",
            "in 8 bits": f"{row['compact_reference_bytes'] / GIB:.2f} GiB",
        }
        seconds = (time(row[name]) for name in ("a2a_seconds", "ring_seconds", "step_seconds"))
        speedup = "" if row["speedup"] is None else f"{row['speedup']:.2f}"
        found.add_row(*(known[column] for column in columns), *seconds, speedup)
    return found


def _bytes(sent: dict[str, float]) -> str:
    return ", ".join(f"{axis} {size(count)}" for axis, count in sent.items())
