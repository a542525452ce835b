"""Provides known clusters: their links, collectives and accelerators.

They are the table in `machines.json`, where every figure has a published source or is marked as assumed. Rates are
those of a rank while all ranks send.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from xfuser_cocodiff.engine.topology.link_profile import AxisLink, Profile
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.tools.accelerator.accelerators import ACCELERATORS, Accelerator

NODE = "node"
_CODEC_COPIES = 4
"""Assumed cost of a fused codec kernel on both ends of a link, in copies of the values."""


@dataclass(frozen=True)
class Machine:
    """Cluster of equal nodes. A rank is a GPU, or one tile of a GPU."""

    name: str
    node_axes: tuple[tuple[str, int], ...]
    """Names and sizes of the axes within a node, outermost first."""
    links: tuple[AxisLink, ...]
    """Links of each axis, including `node`."""
    launch_seconds: float
    """Time of a collective before its first message is sent, in seconds."""
    accelerator: Accelerator
    """Device of a rank."""
    contention: tuple[tuple[float, ...], ...] = ((1.0, 1.0),)
    """Slowdown of the links while a collective uses several axes at once, as points (bytes per rank, factor). Factors
    are interpolated linearly in the logarithm of the bytes, and constant beyond the points."""
    internode_contention: float = 1.0
    """Further factor on `contention` for collectives that cross nodes."""

    @classmethod
    def from_json(cls, name: str, values: dict[str, Any]) -> "Machine":
        """Return the machine of an entry of the table."""
        contention = values.get("contention", [(1.0, 1.0)])
        return cls(
            name,
            tuple(values["node_axes"].items()),
            tuple(AxisLink(axis, **link) for axis, link in values["links"].items()),
            values["launch_seconds"],
            ACCELERATORS[values["accelerator"]],
            tuple(map(tuple, contention)),
            values.get("internode_contention", 1.0),
        )

    @property
    def ranks_per_node(self) -> int:
        """Number of ranks of a node."""
        return math.prod(size for _, size in self.node_axes)

    def topology(self, nodes: int) -> Topology:
        """Return the topology of all ranks of some nodes."""
        return Topology.named(**({NODE: nodes} if nodes > 1 else {}), **dict(self.node_axes))

    def link_profile(self, topology: Topology, message_bytes: float) -> Profile:
        """Return the link profile of some ranks.

        Args:
            topology: topology of the ranks.
            message_bytes: bytes per rank before an all-to-all, which determine the contention.

        Raises:
            KeyError: the topology has an axis that the machine does not have.
        """
        by_name = {link.name: link for link in self.links}
        links = tuple(by_name[axis.name] for axis in topology.axes)
        crosses_nodes = any(axis.name == NODE and axis.size > 1 for axis in topology.axes)
        contention = self.contention_at(message_bytes) * (self.internode_contention if crosses_nodes else 1)
        copied = self.accelerator.copied_bytes_per_second
        return Profile(topology, links, self.launch_seconds, copied, copied / _CODEC_COPIES, contention)

    def contention_at(self, message_bytes: float) -> float:
        """Return the contention factor within a node for messages of this size."""
        sizes, factors = zip(*self.contention, strict=True)
        return float(np.interp(math.log(message_bytes), np.log(sizes), factors))


_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text())
MACHINES = {name: Machine.from_json(name, values) for name, values in _TABLE.items()}
"""Clusters by name."""
