"""A profile: what is known of the links of a machine, measured by a probe or taken from a data sheet."""

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from xfuser_cocodiff.engine.topology.topology import Topology

SLOW_RATIO = 0.2
"""An axis is slow where a rank sends at less than this share of the speed at which it codes. At less than the whole,
since what encoding leaves still has to travel, and small messages cost their calls; machines are noisy besides."""
_SPEEDS = ("copy_bytes_per_second", "codec_bytes_per_second")


@dataclass(frozen=True)
class AxisLink:
    """The links of one axis, while all ranks use theirs at once, as an all-to-all does."""

    name: str
    latency_seconds: float
    """What each further peer on this axis adds to a collective, whatever the size of the message."""
    bytes_per_second: float
    """What a rank sends along this axis to all peers together."""


@dataclass(frozen=True)
class Profile:
    """What the planner knows of a machine."""

    topology: Topology
    links: tuple[AxisLink, ...]
    """One per axis of the topology, in its order."""
    launch_seconds: float
    """What a collective costs before its first message leaves."""
    copy_bytes_per_second: float
    """Speed at which a rank reorders a message between two stages."""
    codec_bytes_per_second: float
    """Speed at which a rank codes and decodes values, in bytes of the values."""
    contention: float = 1.0
    """How many times longer the links take when several axes are busy at once: 1 where they share nothing, less where
    one collective keeps them busier than each axis alone does."""
    direct: "Profile | None" = None
    """The same machine by direct sends; None where the backend's collective leaves nothing to gain by them."""

    @property
    def slow_axes(self) -> tuple[str, ...]:
        """Names of the axes, outermost first, along which a rank sends at less than SLOW_RATIO of the speed at which it
        codes: there codecs save time, on others they cost it."""
        moving = [link for link, axis in zip(self.links, self.topology.axes, strict=True) if axis.size > 1]
        limit = SLOW_RATIO * self.codec_bytes_per_second
        return tuple(link.name for link in moving if link.bytes_per_second < limit)

    def restrict_to(self, topology: Topology) -> "Profile":
        """The profile of some of its axes."""
        links = {axis.name: link for axis, link in zip(self.topology.axes, self.links, strict=True)}
        direct = self.direct and self.direct.restrict_to(topology)
        return replace(self, topology=topology, links=tuple(links[axis.name] for axis in topology.axes), direct=direct)

    def to_json(self) -> dict[str, Any]:
        """The profile as JSON values; the inverse of :meth:`from_json`."""
        direct = self.direct and self.direct.to_json()
        return {**asdict(self), "topology": str(self.topology), "ranks": self.topology.size, "direct": direct}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Profile":
        """Read what :meth:`to_json` made.

        Raises:
            ValueError: something is missing, or a figure is not one.
        """
        try:
            topology = Topology.parse(values["topology"], int(values["ranks"]))
            links = tuple(AxisLink(**link) for link in values["links"])
            figures = {name: float(values[name]) for name in ("launch_seconds", "contention", *_SPEEDS)}
            direct = values["direct"] and cls.from_json(values["direct"])
        except KeyError as error:
            raise ValueError(f"not a profile: {error} is missing") from None
        except TypeError as error:
            raise ValueError(f"not a profile: {error}") from None
        if [link.name for link in links] != [axis.name for axis in topology.axes]:
            raise ValueError(f"not a profile: its links are not those of the topology {topology}")
        speeds = [
            figures["contention"],
            *(figures[name] for name in _SPEEDS),
            *(link.bytes_per_second for link in links),
        ]
        times = [figures["launch_seconds"], *(link.latency_seconds for link in links)]
        if not all(speed > 0 for speed in speeds) or not all(0 <= time < math.inf for time in times):
            raise ValueError("not a profile: speeds must be positive, and times not negative")
        return cls(topology, links, **figures, direct=direct)

    @classmethod
    def read(cls, file: Path) -> "Profile":
        """Read a file that `cocodiff probe --json` wrote.

        Raises:
            ValueError: it cannot be read, or holds no profile.
        """
        try:
            values = json.loads(file.read_text())
            if not isinstance(values, dict) or not isinstance(values.get("profile"), dict):
                raise ValueError("the entry 'profile' is missing")
            return cls.from_json(values["profile"])
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} holds no profile that `cocodiff probe --json` wrote: {error}") from None
