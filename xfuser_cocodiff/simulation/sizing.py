"""The record of `cocodiff plan --model`: a model of real size, a picture and a degree, on a machine or a profile."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xfuser_cocodiff.machine.profile import Profile
from xfuser_cocodiff.machine.topology import FLAT, Topology
from xfuser_cocodiff.reporting import host
from xfuser_cocodiff.settings.options import MODES
from xfuser_cocodiff.settings.placement import Split
from xfuser_cocodiff.simulation.machines import MACHINES, Machine
from xfuser_cocodiff.simulation.outlook import Case, Outlook, outlook, outlooks, stock
from xfuser_cocodiff.simulation.scenario import check_count
from xfuser_cocodiff.simulation.sharding import ulysses_degrees
from xfuser_cocodiff.simulation.workloads import PIXELS_PER_TOKEN, WORKLOADS, Workload

ALIASES = {"flux1": "flux.1-dev", "flux2": "flux.2-dev", "sd35": "sd3.5-large"}
"""Short names of models."""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is to be planned, as the command line has it."""

    model: str
    resolution: int
    degree: int
    topology: str | None = None
    """Of all ranks; without it that of the profile, or of the cluster's nodes."""
    profile: Path | None = None
    cluster: str = "aurora"
    """Where no profile is given."""
    mode: str | None = None
    """None for that in which a run without --cocodiff_mode would be."""
    steps: int = 50
    batch: int = 1
    text_tokens: int | None = None
    """Those of the pipeline, when not given."""
    teraflops: float | None = None
    """What a rank reaches; the cluster's, when not given."""

    def __post_init__(self) -> None:
        check_count("--resolution", self.resolution, PIXELS_PER_TOKEN)
        for option in ("degree", "steps", "batch", "text_tokens"):
            if getattr(self, option) is not None:
                check_count("--" + option.replace("_", "-"), getattr(self, option))
        if self.degree < 2:
            raise ValueError("--degree 1 is not valid; there is nothing to split among fewer than 2 ranks")
        if self.mode not in (None, *MODES):
            raise ValueError(f"--mode {self.mode!r} is not valid; valid are {', '.join(MODES)}")
        if self.teraflops is not None and not self.teraflops > 0:
            raise ValueError(f"--tflops {self.teraflops:g} is not valid; it is a number above 0")

    @property
    def workload(self) -> Workload:
        """The model with the heads that it has: xDiT pads none.

        Raises:
            ValueError: there is no such model.
        """
        name = ALIASES.get(self.model, self.model)
        if name not in WORKLOADS:
            known = ", ".join([*ALIASES, *WORKLOADS])
            raise ValueError(f"--model {self.model!r} is not valid; valid are {known}")
        found = dataclasses.replace(WORKLOADS[name], padded_heads=None)
        return dataclasses.replace(found, text_tokens=self.text_tokens or found.text_tokens)

    def case(self) -> Case:
        """What is known of it.

        Raises:
            ValueError: an option is not valid, or they do not go together.
        """
        workload = self.workload
        common: dict[str, Any] = {"resolution": self.resolution, "batch": self.batch, "steps": self.steps}
        flops = self.teraflops and 1e12 * self.teraflops
        if self.profile:
            profile = Profile.read(self.profile)
            topology = self._given() or profile.topology
            _check_axes(topology, [axis.name for axis in profile.topology.axes], f"the profile {self.profile}")
            return Case(
                workload,
                **common,
                topology=self._of_all(topology),
                flops=flops,
                profile_of=lambda part, _: profile.along(part),
            )
        if self.cluster not in MACHINES:
            raise ValueError(f"--cluster {self.cluster!r} is not valid; valid are {', '.join(MACHINES)}")
        machine = MACHINES[self.cluster]
        topology = self._given() or _nodes(machine, self.degree)
        _check_axes(topology, [link.name for link in machine.links], f"the cluster {machine.name}")
        return Case(
            workload,
            **common,
            topology=topology,
            flops=flops or machine.flops,
            overlaps=machine.overlaps,
            profile_of=machine.over,
        )

    def _given(self) -> Topology | None:
        if self.topology is None:
            return None
        try:
            return self._of_all(Topology.parse(self.topology, self.degree if self.topology.strip() == FLAT else None))
        except ValueError as error:
            raise ValueError(f"--topology: {error}") from None

    def _of_all(self, topology: Topology) -> Topology:
        if topology.size != self.degree:
            raise ValueError(f"{topology} are {topology.size} ranks, but --degree is {self.degree}")
        return topology


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


def _check_axes(topology: Topology, known: list[str], where: str) -> None:
    unknown = [axis.name for axis in topology.axes if axis.name not in known]
    if unknown:
        raise ValueError(f"--topology {topology}: {where} has no axis {', '.join(unknown)}, only {', '.join(known)}")


def record(wish: Wish) -> dict[str, Any]:
    """The record: how heads and tokens divide, every split, and every mode on the best of them.

    Raises:
        ValueError: an option is not valid, or no split is possible.
    """
    case = wish.case()
    found, heads = outlooks(case, wish.mode), case.workload.heads
    if not found:
        degrees = ", ".join(map(str, ulysses_degrees(heads, wish.degree)))
        raise ValueError(
            f"{heads} heads allow the Ulysses degrees {degrees} among {wish.degree} ranks, and neither these nor rings "
            f"beside them lie on the axes of {case.topology} alike; --topology or another --degree would help"
        )
    best, held, theirs = found[0], case.shard, stock(case)
    split = Split(best.ulysses, best.ring, best.placement)
    known = theirs and theirs.step_seconds

    def row(each: Outlook) -> dict[str, Any]:
        speedup = known / each.step_seconds if known and each.step_seconds else None
        return {**dataclasses.asdict(each), "speedup": speedup}

    return {
        **host.header(),
        "model": case.workload.name,
        "resolution": wish.resolution,
        "batch": wish.batch,
        "steps": wish.steps,
        "degree": wish.degree,
        "topology": str(case.topology),
        "machine": str(wish.profile) if wish.profile else wish.cluster,
        "heads": heads,
        "ulysses_degrees": ulysses_degrees(heads, wish.degree),
        "tokens_per_rank": {"image": held.image, "text": held.text},
        "remarks": list(held.remarks),
        "problem": held.problem,
        "stock": theirs and {**row(theirs), "share": theirs.a2a_seconds / known if known else None},
        "splits": [row(each) for each in found],
        "modes": [row(outlook(case, split, mode)) for mode in MODES],
        "flags": flags(best, case.topology),
    }


def flags(best: Outlook, whole: Topology) -> str:
    """What to add to a launch script."""
    ring = f" --cocodiff_ring {best.placement}" if best.ring > 1 else ""
    degrees = f"--ulysses_degree {best.ulysses} --ring_degree {best.ring}"
    return f"{degrees} --use_cocodiff --cocodiff_topology {whole}{ring} --cocodiff_mode {best.mode}"
