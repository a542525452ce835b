"""The topology that launcher, devices and system show on this rank."""

from collections.abc import Mapping
from typing import Any

import torch

from xfuser_cocodiff.engine.topology import launcher, pci
from xfuser_cocodiff.engine.topology.pci import DevicePlace
from xfuser_cocodiff.engine.topology.topology import Topology
from xfuser_cocodiff.xdit.platforms import platform

_XE_LINK = "Max"
"""In the name of devices that have links of their own (Data Center GPU Max)."""


def detect_topology(degree: int, environment: Mapping[str, str]) -> Topology:
    """Return the topology of the Ulysses groups of `degree` ranks that launcher, devices and system show.

    Ranks of different nodes may detect different ones, and compare them.
    """
    local = launcher.ranks_per_node(environment) or degree
    return launcher.detect(degree, environment, platform.device_name(), device_places(local))


def topology_of_launcher(degree: int, environment: Mapping[str, str]) -> Topology:
    """Return the topology without axes that the PCIe tree of this node shows; nodes may differ in these."""
    return launcher.detect(degree, environment, platform.device_name())


def device_places(local: int) -> tuple[DevicePlace, ...]:
    """Return the places of the devices of this node's ranks in the PCIe tree.

    Empty where devices have links of their own, which PCIe's tree says nothing about, and where this rank does not see
    the devices of all ranks of its node.

    Args:
        local: number of ranks on this node.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not 1 < local <= torch.accelerator.device_count():
        return ()
    addresses: list[str] = []
    if accelerator.type == "cuda" and not _may_have_nvlink():
        addresses = [_pci_address(torch.cuda.get_device_properties(index)) for index in range(local)]
    elif accelerator.type == "xpu" and _XE_LINK not in platform.device_name():
        found = pci.intel_gpus()
        addresses = found[:local] if len(found) == torch.accelerator.device_count() else []
    places = [pci.place_of(address) for address in addresses]
    return tuple(place for place in places if place) if all(places) else ()


def _pci_address(properties: Any) -> str:
    numbers = (getattr(properties, f"pci_{name}_id", 0) for name in ("domain", "bus", "device"))
    return "{:04x}:{:02x}:{:02x}.0".format(*numbers)


def _may_have_nvlink() -> bool:
    """Return whether CUDA devices of this machine have NVLink; true if this PyTorch cannot tell, and on ROCm."""
    try:
        detect = torch._C._distributed_c10d._detect_dma_connectivity
        links = detect(torch._C._autograd.DeviceType.CUDA, "nvlink").matrix
    except (AttributeError, RuntimeError):
        return True
    return any(count > 0 for row in links for count in row)
