"""Sockets and PCIe switches in a fake sysfs, and the topology that follows from them."""

from pathlib import Path

import pytest

from xfuser_cocodiff.engine.topology import launcher, pci
from xfuser_cocodiff.engine.topology.pci import DevicePlace


def add_device(sysfs: Path, path: str, numa_node: int = 0, **files: str) -> str:
    """Add a device below a root complex to a fake sysfs and return its address."""
    device = sysfs / "devices" / path
    device.mkdir(parents=True)
    for name, text in {"numa_node": str(numa_node), **files}.items():
        (device / name).write_text(f"{text}\n")
    links = sysfs / "bus/pci/devices"
    links.mkdir(parents=True, exist_ok=True)
    (links / device.name).symlink_to(device)
    return device.name


def test_places_are_read_from_sysfs(tmp_path: Path) -> None:
    behind = "pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:{}.0/0000:{}:00.0"
    switched = [add_device(tmp_path, behind.format(*port), 1) for port in (("00", "19"), ("01", "1a"))]
    assert [pci.place_of(each, tmp_path) for each in switched] == [DevicePlace(1, "0000:17:00.0")] * 2
    direct = add_device(tmp_path, "pci0000:97/0000:97:01.0/0000:98:00.0")
    assert pci.place_of(direct, tmp_path) == DevicePlace(0, "0000:97:01.0")
    unknown = add_device(tmp_path, "pci0000:a0/0000:a0:01.0/0000:a1:00.0", -1)
    assert pci.place_of(unknown, tmp_path).socket is None
    virtual = add_device(tmp_path, "LNXSYSTM:00/0000:00:05.0")
    assert pci.place_of(virtual, tmp_path) is None
    assert pci.place_of("0000:ff:00.0", tmp_path) is None


def test_discrete_gpus_of_intel_are_found_in_order(tmp_path: Path) -> None:
    display, intel = "0x030000", "0x8086"
    add_device(tmp_path, "pci0000:00/0000:00:02.0", vendor=intel, **{"class": display})
    add_device(tmp_path, "pci0000:40/0000:40:01.0/0000:43:00.0", vendor=intel, **{"class": display})
    add_device(tmp_path, "pci0000:20/0000:20:01.0/0000:23:00.0", vendor=intel, **{"class": display})
    add_device(tmp_path, "pci0000:20/0000:20:02.0/0000:24:00.0", vendor=intel, **{"class": "0x020000"})
    add_device(tmp_path, "pci0000:20/0000:20:03.0/0000:25:00.0", vendor="0x10de", **{"class": display})
    assert pci.intel_gpus(tmp_path) == ["0000:23:00.0", "0000:43:00.0"]


def places(text: str) -> list[DevicePlace]:
    """Return places from words of a socket, '-' if unknown, and a switch: '0a 0a 1b'."""
    return [DevicePlace(None if word[0] == "-" else int(word[0]), word[1]) for word in text.split()]


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("0a 0a 0b 0b 1c 1c 1d 1d", ("socket", 2)),
        ("0a 0a 0b 0b", ("switch", 2)),
        ("-a -a -b -b", ("switch", 2)),
        ("0a 0a 0a 0a", None),
        ("0a 0b 0c 0d", None),  # a switch for each device divides nothing
        ("0a 1b", None),
        ("0a 0a 0a 1b", None),  # unequal
        ("0a 1b 0a 1b", None),  # ranks of a socket are not consecutive
        ("0a 0a 1b 1b 0a 0a", None),
    ],
)
def test_equal_blocks_of_several_ranks_are_an_axis(text: str, axis: tuple[str, int] | None) -> None:
    assert pci.axis_of(places(text)) == axis


BOX = "0a 0a 0b 0b 1c 1c 1d 1d"


@pytest.mark.parametrize(
    ("degree", "local", "text", "expected"),
    [
        (8, 8, BOX, "socket=2,gpu=4"),
        (16, 8, BOX, "node=2,socket=2,gpu=4"),
        (4, 8, BOX, "switch=2,gpu=2"),
        (2, 8, BOX, "flat"),
        (4, 8, "0a 0a 0a 0a 1c 1c 1d 1d", "flat"),  # the two groups have different ones
        (8, 8, "", "flat"),
        (4, 4, BOX, "flat"),  # the places of other ranks
    ],
)
def test_detected_topologies_have_the_axis(degree: int, local: int, text: str, expected: str) -> None:
    topology = launcher.detect(degree, {"LOCAL_WORLD_SIZE": str(local)}, "", places(text))
    assert (str(topology), topology.size) == (expected, degree)


def test_tiles_are_inside_of_sockets() -> None:
    environment = {"LOCAL_WORLD_SIZE": "8", "ZE_FLAT_DEVICE_HIERARCHY": "FLAT"}
    assert str(launcher.detect(8, environment, "", places("0a 0a 0a 0a 1b 1b 1b 1b"))) == "socket=2,gpu=2,tile=2"
