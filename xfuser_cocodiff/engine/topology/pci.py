"""Sockets and PCIe switches of the devices of a node, from Linux's sysfs.

Where devices have no links of their own, messages between two of them cross the PCIe tree: a switch, a root complex, or
the link between two sockets, each slower than the one before under load.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

SYSFS = Path("/sys")
_ROOT = re.compile(r"pci[0-9a-f]{4}:[0-9a-f]{2}")
_INTEL, _DISPLAY = "0x8086", "0x03"
"""Vendor of Intel's GPUs, and class of display controllers, by the first digits."""


@dataclass(frozen=True)
class DevicePlace:
    """Place of a device in the PCIe tree of its node."""

    socket: int | None
    """NUMA node; None if the system does not know it."""
    switch: str
    """Address of the outermost switch above the device; of the root port where it has none."""


def place_of(address: str, sysfs: Path = SYSFS) -> DevicePlace | None:
    """Return the place of a PCI device, such as '0000:1a:00.0'; None if sysfs does not describe it.

    Below a root complex, the path of a device behind a switch has a root port, the switch's upstream and downstream
    ports, and the device.
    """
    device = sysfs / "bus/pci/devices" / address
    parts = device.resolve().parts
    roots = [index for index, part in enumerate(parts) if _ROOT.fullmatch(part)]
    try:
        socket = int((device / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    if not roots:
        return None
    below = parts[roots[0] + 1 :]
    return DevicePlace(socket if socket >= 0 else None, below[1] if len(below) >= 4 else below[0])


def intel_gpus(sysfs: Path = SYSFS) -> list[str]:
    """Return the addresses of Intel's discrete GPUs in ascending order."""
    return sorted(
        device.name
        for device in (sysfs / "bus/pci/devices").glob("*")
        if not device.name.startswith("0000:00:")  # integrated
        and _read(device / "vendor") == _INTEL
        and _read(device / "class").startswith(_DISPLAY)
    )


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def axis_of(places: Sequence[DevicePlace]) -> tuple[str, int] | None:
    """Return the name and size of the axis that divides consecutive ranks, given their devices; None if there is none.

    One axis is enough, since each adds a collective: sockets, or switches where all devices are on one socket. It must
    divide the ranks into equal blocks of several.
    """
    for name, keys in (("socket", [place.socket for place in places]), ("switch", [place.switch for place in places])):
        blocks = [len(list(block)) for _, block in groupby(keys)]
        is_uniform = None not in keys and len(set(blocks)) == 1 and len(set(keys)) == len(blocks)
        if is_uniform and len(blocks) > 1 and blocks[0] > 1:
            return name, len(blocks)
    return None
