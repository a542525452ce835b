"""The topology that a rank detects from its devices' places in a fake sysfs."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.engine.topology.test_pci import add_device
from xfuser_cocodiff.engine.topology import pci
from xfuser_cocodiff.xdit.platforms import detected_topology, platform

LAUNCHED = {"LOCAL_WORLD_SIZE": "4"}
BUSES = (0x19, 0x1A, 0x99, 0x9A)


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A box of four CUDA devices without NVLink, two behind a switch of each socket."""
    for bus in BUSES:
        root = "10" if bus < 0x80 else "90"
        bridges = f"0000:{root}:01.0/0000:{root[0]}1:00.0/0000:{root[0]}2:{bus & 7:02x}.0"
        add_device(tmp_path, f"pci0000:{root}/{bridges}/0000:{bus:02x}:00.0", int(bus >= 0x80))
    read = pci.place_of
    monkeypatch.setattr(pci, "place_of", lambda address: read(address, tmp_path))
    use(monkeypatch, "cuda", 4)
    properties = [SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=0) for bus in BUSES]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties[index])
    set_nvlink(monkeypatch, 0)


def use(monkeypatch: pytest.MonkeyPatch, device_type: str, count: int) -> None:
    device = torch.device(device_type)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: device)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


def set_nvlink(monkeypatch: pytest.MonkeyPatch, links: int) -> None:
    connectivity = SimpleNamespace(matrix=[[0, links], [links, 0]])
    c10d = torch._C._distributed_c10d
    monkeypatch.setattr(c10d, "_detect_dma_connectivity", lambda device, kind: connectivity, raising=False)


def detected(degree: int = 4) -> str:
    return str(detected_topology.detect_topology(degree, LAUNCHED))


def test_sockets_of_a_pcie_box_are_an_axis(box: None) -> None:
    assert detected() == "socket=2,gpu=2"
    assert detected(8) == "node=2,socket=2,gpu=2"


@pytest.mark.parametrize("links", [18, None])
def test_devices_that_may_have_nvlink_have_no_sockets(
    box: None, links: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if links:
        set_nvlink(monkeypatch, links)
    else:
        monkeypatch.delattr(torch._C._distributed_c10d, "_detect_dma_connectivity")
    assert detected() == "flat"


def test_a_rank_that_does_not_see_all_devices_detects_none(box: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert detected() == "flat"


@pytest.mark.parametrize(
    ("name", "addresses", "expected"),
    [
        ("Intel(R) Arc(TM) Pro B60 Graphics", 4, "socket=2,gpu=2"),
        ("Intel(R) Data Center GPU Max 1100", 4, "flat"),  # Xe Link
        ("Intel(R) Arc(TM) Pro B60 Graphics", 5, "flat"),  # which of them PyTorch sees is unknown
    ],
)
def test_sockets_of_xpus(box: None, name: str, addresses: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "xpu", 4)
    monkeypatch.setattr(platform, "device_name", lambda: name)
    found = [f"0000:{bus:02x}:00.0" for bus in (*BUSES, 0xF0)[:addresses]]
    monkeypatch.setattr(pci, "intel_gpus", lambda: found)
    assert detected() == expected
