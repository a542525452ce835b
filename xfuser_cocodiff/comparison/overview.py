"""Comparisons at one glance: a row for each side, and in a sentence what they come to."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xfuser_cocodiff.machine.topology import FLAT, Topology
from xfuser_cocodiff.reporting.words import NOTHING, decibels, size, spread, total

NODE = "node"
HERE = "Links of this machine"
"""What links are called that were not emulated, where the user gives them no name."""
CHANCE = "no significant difference"
"""Said of the speed of two sides whose ranges of repeats overlap."""
SAME = "bit-identical"


@dataclass(frozen=True)
class Row:
    """One side of a comparison, in words."""

    side: str
    step: str
    """Its time, with the spread of the repeats."""
    speedup: str
    """Over stock."""
    sent: str
    """By a rank in a step: over links between nodes where there are nodes, else over all links."""
    psnr: str
    picture: str


@dataclass(frozen=True)
class Setting:
    """A comparison, and the folder that its record and its pictures lie in."""

    record: Mapping[str, Any]
    folder: Path

    @classmethod
    def read(cls, folder: Path) -> "Setting":
        """Read what an earlier comparison left.

        Raises:
            ValueError: there is none that came to its end.
        """
        try:
            record = json.loads((folder / "report.json").read_text())
            return cls({**record, "runs": list(record["runs"])}, folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder} is no folder of a comparison that came to its end: {error}") from None

    @property
    def title(self) -> str:
        """What its links are called."""
        if title := self.record.get("title"):
            return title
        cluster = self.record.get("cluster")
        return f"Emulated {cluster['preset']} links, {cluster['topology']}" if cluster else HERE

    @property
    def stock(self) -> Mapping[str, Any]:
        """The side that the others are compared to."""
        return self.record["runs"][0]

    @property
    def plugins(self) -> list[Mapping[str, Any]]:
        """The other sides."""
        return self.record["runs"][1:]

    @property
    def topology(self) -> Topology | None:
        """Of a Ulysses group, as the plugin has it; None where it was not in use."""
        text = next((run["topology"] for run in self.plugins if run["topology"]), None)
        return Topology.parse(text, self.stock["degree"]) if text else None

    @property
    def has_nodes(self) -> bool:
        """Whether there are several."""
        axes = self.topology.axes if self.topology else ()
        return any(axis.name == NODE and axis.size > 1 for axis in axes)

    def sent_bytes(self, run: Mapping[str, Any]) -> int | None:
        """What a rank sends in a step: to other nodes where there are some, else to all ranks."""
        topology, sent = self.topology, run["bytes"]
        if sent is None or topology is None or not self.has_nodes:
            return total(sent)
        return round(sum(count * between_nodes(stage, topology) for stage, count in sent.items()))

    def rows(self) -> list[Row]:
        """One for each side, stock first."""
        return [self._row(run) for run in self.record["runs"]]

    def _row(self, run: Mapping[str, Any]) -> Row:
        stock = run is self.stock
        return Row(
            side=run["name"],
            step=spread(run["step_seconds"]),
            speedup=NOTHING if stock else speedup(run, self.stock),
            sent=size(self.sent_bytes(run)),
            psnr=NOTHING if stock else "equal" if run["latents"]["bit_equal"] else decibels(run["image"]["psnr_db"]),
            picture=NOTHING if stock else _picture(run),
        )

    def sentence(self) -> str:
        """What it comes to."""
        return f"{self.title}: {'; '.join(map(self._said, self.plugins))}."

    def _said(self, run: Mapping[str, Any]) -> str:
        said = speedup(run, self.stock)
        speed = f"{CHANCE} in speed" if said == CHANCE else f"speedup {said}"
        near = run["image"]["psnr_db"]
        what = SAME if run["latents"]["bit_equal"] else "differs" if near is None else f"PSNR {decibels(near)} to stock"
        return f"{run['name']} {speed}, {what}"


def _picture(run: Mapping[str, Any]) -> str:
    if run["latents"]["bit_equal"]:
        return SAME
    return "approximated" if run["codecs"] is not None else "differs"


def speedup(run: Mapping[str, Any], stock: Mapping[str, Any]) -> str:
    """Return a side's speedup over stock, of the medians, and how far it can be believed."""
    ours, theirs = run["step_seconds_spread"], stock["step_seconds_spread"]
    if ours["min"] <= theirs["max"] and theirs["min"] <= ours["max"]:
        return CHANCE
    found = 1 / run["ratio_to_stock"]
    qualified = [*(["slower"] if found < 1 else []), *(["one repeat"] if len(run["step_seconds"]) == 1 else [])]
    return f"{found:.2f}x" + (f" ({', '.join(qualified)})" if qualified else "")


def between_nodes(stage: str, topology: Topology) -> float:
    """The share of the bytes of a stage, which go to each of its ranks alike, that goes to other nodes.

    Args:
        stage: as traffic is counted: an axis, several that are merged, or flat.
        topology: of all ranks.
    """
    named = stage.split("+")
    sizes = {axis.name: axis.size for axis in topology.axes if stage == FLAT or axis.name in named}
    ranks = math.prod(sizes.values())
    return 0.0 if ranks == 1 else (ranks - ranks // sizes.get(NODE, 1)) / (ranks - 1)


def columns(settings: Sequence[Setting]) -> tuple[str, ...]:
    """What stands above the columns of rows."""
    sent = "sent between nodes" if all(setting.has_nodes for setting in settings) else "sent"
    return ("", "step time", "speedup", sent, "PSNR to stock", "result")


def table(settings: Sequence[Setting]) -> str:
    """A table for a terminal."""
    rows = {setting.title: [tuple(vars(row).values()) for row in setting.rows()] for setting in settings}
    cells = [columns(settings), *(row for found in rows.values() for row in found)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

    def line(row: tuple[str, ...]) -> str:
        figures = (f"{cell:>{width}}" for cell, width in zip(row[1:-1], widths[1:-1], strict=True))
        return "   ".join((row[0].ljust(widths[0]), *figures, row[-1]))

    lines = [line(columns(settings))]
    for title, found in rows.items():
        lines += [title] if len(settings) > 1 else []
        lines += map(line, found)
    return "\n".join(lines)
