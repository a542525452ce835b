"""The topology that launcher and device show on this rank."""

from collections.abc import Mapping

from xfuser_cocodiff.engine.topology import launcher
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.platforms import platform


def detect_topology(degree: int, environment: Mapping[str, str]) -> Topology:
    """Return the topology of the Ulysses groups of `degree` ranks that launcher and device show.

    Ranks of different nodes may detect different ones, and compare them.
    """
    return launcher.detect(degree, environment, platform.device_name())
