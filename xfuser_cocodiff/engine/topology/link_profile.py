"""Link profiles: latency and bandwidth of a machine's links, measured by a probe or taken from a data sheet."""

import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from xfuser_cocodiff.engine.topology import json_file, slow_axes
from xfuser_cocodiff.engine.topology.topology import Topology


@dataclass(frozen=True)
class AxisLink:
    """The links of one axis, while all ranks use theirs at once, as in an all-to-all."""

    name: str
    latency_seconds: float
    """Time that each peer on this axis adds to a collective, independent of the message size."""
    bytes_per_second: float
    """Bandwidth of a rank along this axis, to all peers together."""


@dataclass(frozen=True)
class Profile:
    """Link profile of a machine, the input of the planner."""

    topology: Topology
    links: tuple[AxisLink, ...]
    """Links of each axis, in the order of the topology."""
    launch_seconds: float
    """Time of a collective before its first message is sent."""
    copy_bytes_per_second: float
    """Speed at which a rank reorders a message between two stages."""
    codec_bytes_per_second: float
    """Speed at which a rank encodes and decodes, in bytes of the original values; 0 where it was not measured."""
    contention: float = 1.0
    """Factor by which link times grow when several axes are busy at once: 1 if they share nothing, below 1 if one
    collective uses them better than separate ones do."""
    coding_host_seconds: float = 0.0
    """Host time that encoding and decoding a tensor of a layer takes on an asynchronous device; 0 if unknown, and on
    CPUs, where it is part of the codec's speed."""

    @property
    def slow_axes(self) -> tuple[str, ...]:
        """Names of the outermost axes on which codecs save time; none where the codec was not measured."""
        return self._slow_axes_at(self.codec_bytes_per_second)

    @property
    def may_have_slow_axes(self) -> bool:
        """Whether an axis may be slow whatever the codec's throughput, which is below that of a copy: the codec reads
        and writes its values too, and their references besides."""
        return bool(self._slow_axes_at(self.copy_bytes_per_second))

    def _slow_axes_at(self, codec_bytes_per_second: float) -> tuple[str, ...]:
        rates = {link.name: link.bytes_per_second for link in self.moving_links}
        return slow_axes.slow_axes(rates, codec_bytes_per_second)

    @property
    def moving_links(self) -> list[AxisLink]:
        """Links of the axes with more than one rank."""
        return [link for link, axis in zip(self.links, self.topology.axes, strict=True) if axis.size > 1]

    def with_codec(self, bytes_per_second: float, host_seconds: float) -> "Profile":
        """Return the profile with the speed of a codec; 0 for a codec that was not measured.

        Args:
            bytes_per_second: see :attr:`codec_bytes_per_second`.
            host_seconds: see :attr:`coding_host_seconds`.
        """
        return replace(self, codec_bytes_per_second=bytes_per_second, coding_host_seconds=host_seconds)

    def restrict_to(self, topology: Topology) -> "Profile":
        """Return the profile of a topology that has some of the axes."""
        links = {axis.name: link for axis, link in zip(self.topology.axes, self.links, strict=True)}
        return replace(self, topology=topology, links=tuple(links[axis.name] for axis in topology.axes))

    def to_json(self) -> dict[str, Any]:
        """Return the profile as JSON values; the inverse of :meth:`from_json`."""
        return {**asdict(self), "topology": str(self.topology), "ranks": self.topology.size}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Profile":
        """Build a profile from the values of :meth:`to_json`.

        Raises:
            ValueError: an entry is missing or out of range.
        """
        try:
            topology = Topology.parse(values["topology"], int(values["ranks"]))
            links = tuple(
                AxisLink(each["name"], float(each["latency_seconds"]), float(each["bytes_per_second"]))
                for each in values["links"]
            )
            names = [each.name for each in fields(cls) if each.name not in ("topology", "links")]
            figures = {name: float({"coding_host_seconds": 0.0, **values}[name]) for name in names}
        except KeyError as error:
            raise ValueError(f"not a link profile: {error} is missing") from None
        except (TypeError, OverflowError, AttributeError) as error:
            raise ValueError(f"not a link profile: {error}") from None
        if [link.name for link in links] != [axis.name for axis in topology.axes]:
            raise ValueError(f"not a link profile: its links are not those of the topology {topology}")
        profile = cls(topology, links, **figures)
        speeds = [profile.contention, profile.copy_bytes_per_second, *(link.bytes_per_second for link in links)]
        times = [profile.launch_seconds, profile.coding_host_seconds, *(link.latency_seconds for link in links)]
        has_valid_speeds = all(speed > 0 for speed in speeds) and profile.codec_bytes_per_second >= 0
        if not has_valid_speeds or not all(0 <= time < math.inf for time in times):
            raise ValueError("not a link profile: speeds must be positive, and times finite and not negative")
        return profile

    @classmethod
    def read(cls, file: Path) -> "Profile":
        """Read a file that `cocodiff probe --json` wrote.

        Raises:
            ValueError: the file cannot be read or contains no profile.
        """
        try:
            values = json_file.read(file)
            if not isinstance(values, dict) or not isinstance(values.get("profile"), dict):
                raise ValueError("the entry 'profile' is missing")
            return cls.from_json(values["profile"])
        except (OSError, ValueError) as error:
            raise ValueError(f"{str(file)!r} has no link profile of `cocodiff probe --json`: {error}") from None
